"""User errors: what the user can fix, or has ended, is said in one line, without a traceback."""

import errno
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from types import FrameType

from fasttrain.events import ExitCode

_REMEDIES = {
    errno.ENOSPC: "free some disk space, or name another place",
    errno.EDQUOT: "free some of your quota, or name another place",
    errno.EACCES: "change its permissions, or name another place",
    errno.EROFS: "the file system is read-only; name another place",
    errno.EMFILE: "raise the limit of open files: ulimit -n 1024",
    errno.ENOENT: "check the name",
    errno.ESTALE: "the network file system has lost it; mount it again",
}


@contextmanager
def user_errors(program: str = "fasttrain.train") -> Iterator[None]:
    """Turn errors that the user can fix into one line, once per machine, and exit code 2; Ctrl-C into one and 130."""
    first = os.environ.get("LOCAL_RANK", "0") == "0"
    try:
        with ExitStack() as stack:
            if not first:
                stack.enter_context(redirect_stderr(io.StringIO()))
                stack.enter_context(redirect_stdout(io.StringIO()))
            try:
                yield
            finally:
                sys.stdout.flush()  # here, where a reader that has left is no traceback
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what is flushed at exit
        raise SystemExit(128 + signal.SIGPIPE) from None
    except KeyboardInterrupt:
        if first:
            print(f"{program}: interrupted", file=sys.stderr)
        raise SystemExit(128 + signal.SIGINT) from None
    except RuntimeError as error:
        if not (text := out_of_memory(error, training=program == "fasttrain.train")):
            raise
        print(f"{program}: error: {text}", file=sys.stderr)  # also of other ranks: each has its own GPU
        raise SystemExit(ExitCode.USER_ERROR) from error
    except (ValueError, OSError, ImportError) as error:
        if first:
            print(f"{program}: error: {_text(error)}", file=sys.stderr)
        raise SystemExit(ExitCode.USER_ERROR) from error


def out_of_memory(error: BaseException, *, training: bool) -> str:
    """What to say when a GPU's memory is full; empty: it is another error. Nothing here imports torch for that."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, torch.OutOfMemoryError):
        return ""
    said = str(error).partition(" Of the allocated memory")[0].removesuffix(".").replace(". ", "; ")
    others = "see what else is on the GPU: nvidia-smi"
    if not training:
        return f"{said}; {others}; or use --device cpu"
    remedy = "lower batch.micro, set parallel.recompute to selective or full, or shard the model over more GPUs"
    return f"{said}; {remedy} (fasttrain plan says what a setting needs); {others}"


def _text(error: Exception) -> str:
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    about = f"{error.filename}: " if error.filename is not None else ""
    remedy = f"; {_REMEDIES[error.errno]}" if error.errno in _REMEDIES else ""
    return f"{about}{error.strerror}{remedy}"


@contextmanager
def interruptible(program: str) -> Iterator[None]:
    """SIGTERM and SIGHUP unwind a command as Ctrl-C does, so that nothing half-written and no process stays behind.

    Not while a module is imported: an exception in the midst of a C++ one's initialisation aborts the process.
    """

    def end(number: int, frame: FrameType | None) -> None:
        importing, ctrl_c = _is_importing(frame), number == signal.SIGINT
        if importing or not ctrl_c:  # else user_errors says it
            how = "interrupted" if ctrl_c else f"ended by {signal.Signals(number).name}"
            print(f"{program}: {how}", file=sys.stderr)
        if importing:
            os._exit(128 + number)
        raise KeyboardInterrupt if ctrl_c else SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_importing(frame: FrameType | None) -> bool:
    while frame and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None
