"""User errors: what the user can fix is said in one line, without a traceback."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout

from fasttrain.events import ExitCode


@contextmanager
def user_errors(program: str = "fasttrain.train") -> Iterator[None]:
    """Turn errors that the user can fix into one line, once per machine, and exit code 2."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        with ExitStack() as stack:
            if not first:
                stack.enter_context(redirect_stderr(io.StringIO()))
                stack.enter_context(redirect_stdout(io.StringIO()))
            yield
    except (ValueError, OSError, ImportError) as error:
        if first:
            print(f"{program}: error: {error}", file=sys.stderr)
        raise SystemExit(ExitCode.USER_ERROR) from error
