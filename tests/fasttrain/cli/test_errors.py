"""What ends a command: mistakes, the system's errors, signals, a reader that has left. One line, no traceback."""

import errno
import os
import signal
import subprocess
import sys

import pytest
import torch

from fasttrain.cli import main
from fasttrain.cli.errors import interruptible, user_errors

SLEEPER = """
import sys, time
from fasttrain.cli.errors import interruptible, user_errors
with user_errors("fasttrain export"), interruptible("fasttrain export"):
    try:
        print("ready", flush=True)
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)
"""


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGINT, "fasttrain export: interrupted\n"),
        (signal.SIGTERM, "fasttrain export: ended by SIGTERM\n"),
        (signal.SIGHUP, "fasttrain export: ended by SIGHUP\n"),
    ],
)
def test_signals_unwind_a_command(number, said):
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, out, err) == (128 + number, "cleaned up\n", said)


def test_a_reader_that_has_left_is_no_traceback():
    code = (
        "from fasttrain.cli.errors import user_errors\n"
        "with user_errors('fasttrain'):\n"
        "    for _ in range(100_000): print('a line')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(30) == 128 + signal.SIGPIPE


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/data/x"), "/data/x: Permission denied; change its perm"),
        (OSError(errno.ENOSPC, "No space left on device", "a.html"), "a.html: No space left on device; free some disk"),
        (OSError(errno.EMFILE, "Too many open files"), "Too many open files; raise the limit of open files: ulimit -n"),
        (OSError(errno.EIO, "Input/output error", "a"), "a: Input/output error\n"),
        (FileNotFoundError("runs/x does not exist; name a run"), "runs/x does not exist; name a run\n"),
        (ValueError("--keep 0"), "--keep 0\n"),
    ],
)
def test_errors_of_the_system_name_the_file_and_the_remedy(error, said, capsys):
    with pytest.raises(SystemExit) as end, user_errors("fasttrain plan"):
        raise error
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"fasttrain plan: error: {said}")


@pytest.mark.parametrize(
    ("program", "remedy"), [("fasttrain.train", "lower batch.micro"), ("fasttrain generate", "use --device cpu")]
)
def test_a_full_gpu_is_an_error_with_a_remedy(program, remedy, capsys):
    said = "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has 286.10 MiB of which 16.10 MiB is free."
    with pytest.raises(SystemExit) as end, user_errors(program):
        raise torch.OutOfMemoryError(f"{said} Of the allocated memory 268.29 MiB is allocated by PyTorch")
    assert end.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith(f"{program}: error: CUDA out of memory; Tried to allocate 20.00 MiB; GPU 0 has 286.10 MiB of")
    assert remedy in err
    assert err.count("\n") == 1


def test_another_error_of_the_program_keeps_its_traceback():
    with pytest.raises(RuntimeError, match="shapes"), user_errors("fasttrain.train"):
        raise RuntimeError("shapes differ")


def test_handlers_are_those_of_before_afterwards():
    before = signal.getsignal(signal.SIGTERM)
    with interruptible("x"):
        assert signal.getsignal(signal.SIGTERM) is not before
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("arguments", [["--version"], ["-V"]])
def test_the_version(arguments):
    said = subprocess.check_output([sys.executable, "-m", "fasttrain", *arguments], text=True)
    assert said.startswith("fasttrain 0.")


@pytest.mark.parametrize("width", ["20", "40", "200"])
@pytest.mark.parametrize("command", [["train"], ["plan"], ["data", "prepare"]])
def test_help_at_any_width(command, width):
    argv = [sys.executable, "-m", "fasttrain", *command, "--help"]
    done = subprocess.run(argv, env=os.environ | {"COLUMNS": width}, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--recipe" in done.stdout or command[0] == "data"


def test_ctrl_c_while_a_checkpoint_is_read_is_no_damage(small_run, tmp_path, monkeypatch, capsys):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fasttrain.checkpoint.state.TensorReader.read_data", interrupted)
    with pytest.raises(SystemExit) as end:
        main(["export", str(small_run), "--out", str(tmp_path / "exported")])
    assert end.value.code == 128 + signal.SIGINT
    assert capsys.readouterr().err.splitlines()[-1] == "fasttrain export: interrupted"
    assert list(tmp_path.iterdir()) == []
