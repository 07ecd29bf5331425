"""torchrun starts ranks again whatever they failed of, and ends with a traceback of its own.

A mistake of the user stays one. It is left in the error file, where torchrun looks for the cause of a failure: its
summary then ends with the message, and a rank that is started again finds it there and ends at once, without torch.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fasttrain.events import ExitCode


@contextmanager
def mistakes_are_final() -> Iterator[None]:
    """Tell torchrun of user errors; end at once if an earlier start of this rank has had one."""
    path, local_rank = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", os.devnull)), os.environ.get("LOCAL_RANK", "0")
    attempts = path.parents[2].glob(f"attempt_*/{local_rank}/{path.name}") if len(path.parents) > 3 else []
    former = [text for attempt in attempts if (text := _mistake(attempt))]
    try:
        if former:
            if local_rank == "0":
                print(f"fasttrain.train: error: as before: {former[0]}", file=sys.stderr)
            raise SystemExit(ExitCode.USER_ERROR)
        yield
    except SystemExit as end:
        if end.code == ExitCode.USER_ERROR and path.parent.exists():
            text = former[0] if former else str(end.__cause__ or "an argument is wrong; the message is above")
            extra = dict(timestamp=str(int(time.time())))
            path.write_text(json.dumps(dict(message=dict(message=text, extraInfo=extra, mistake=True))))
            time.sleep(0.0 if local_rank == "0" else 0.5)  # torchrun kills the others: the first one has to speak
        raise


def _mistake(attempt: Path) -> str:
    """The user error that an attempt has left; empty: none."""
    try:
        message = json.loads(attempt.read_text())["message"]
        return message["message"] if message.get("mistake") else ""
    except (OSError, ValueError, KeyError, AttributeError, TypeError):  # written by another program
        return ""
