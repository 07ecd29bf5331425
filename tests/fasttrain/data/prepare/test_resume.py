"""A preparation that was killed resumes, and ends with the files of one that was not."""

import gzip
import json
import os
import random
import re
import signal
import time
from pathlib import Path

import pytest

from fasttrain.config import PrepareConfig
from fasttrain.data.dataset import Dataset
from fasttrain.data.prepare import preparation, prepare
from fasttrain.data.prepare.preparation import locked, work_directory_of
from fasttrain.data.prepare.workers import in_order

TEXTS = [f"Document {i} is {'long ' * (i % 9)}enough, with the number {i * 31}.\n" for i in [*range(170), *range(30)]]


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch) -> list[Path]:
    """A few hundred documents, some of them bad or twice there, in 20 chunks with a sync after each."""
    monkeypatch.setattr("fasttrain.data.prepare.inputs.CHUNK_BYTES", 1200)
    monkeypatch.setattr(preparation, "SYNC_SECONDS", 0)
    lines = [json.dumps({"text": text}) for text in TEXTS]
    lines[50] = "{"
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text("\n".join(lines[:100]))
    (tmp_path / "in" / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(lines[100:]).encode()))
    for i in range(20):
        (tmp_path / "in" / f"c{i}.txt").write_text(f"A text file by itself, the one with number {i}\n" * 5)
    (tmp_path / "in" / "d.bin").write_bytes(b"\0" * 100)
    return [tmp_path / "in"]


def run(inputs, out, *, workers=1, tokenizer="bytes", **options):
    return prepare(inputs, out, tokenizer=tokenizer, settings=PrepareConfig(validation=0.1), workers=workers, **options)


def content(path: Path) -> dict[str, bytes]:
    Dataset(path).verify()
    return {file.name: file.read_bytes() for file in path.iterdir()}


def in_child(call) -> int:
    """Its exit status, as waitpid has it."""
    child = os.fork()
    if not child:
        try:
            call()
            os._exit(0)
        finally:
            os._exit(1)  # not as a second pytest
    return os.waitpid(child, 0)[1]


def killing(function, moment: int):
    """The function, which kills the process at its n-th call."""
    calls = 0

    def call(*arguments):
        nonlocal calls
        calls += 1
        if calls == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments)

    return call


@pytest.mark.parametrize("name", ["fsync", "replace", "rename"])
def test_killed_again_and_again_it_ends_with_the_same_files(tmp_path, inputs, name):
    run(inputs, tmp_path / "whole")
    kills, moment = 0, 1
    while True:

        def attempt(moment=moment):
            setattr(os, name, killing(getattr(os, name), moment))
            run(inputs, tmp_path / "out")

        if in_child(attempt) == 0:
            break
        assert not (tmp_path / "out").exists() or name == "fsync"
        kills += 1
        moment += 5
    assert kills >= dict(fsync=4, replace=2, rename=1)[name]
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_killed_at_random_with_workers(tmp_path, inputs):
    run(inputs, tmp_path / "whole", tokenizer=400)
    kills, chance = 0, random.Random(0)
    while not (tmp_path / "out").exists():
        child = os.fork()
        if not child:
            try:
                run(inputs, tmp_path / "out", workers=2, tokenizer=400)
            finally:
                os._exit(0)
        time.sleep(chance.uniform(0, 0.1 + 0.1 * kills))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
    assert kills > 1
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_workers_that_outlive_a_killed_process_do_not_hold_its_lock(tmp_path, inputs):
    started, held = tmp_path / "started", tmp_path / "held"
    held.mkdir()

    def work(chunk):
        started.touch()
        time.sleep(0.9)  # longer than the kill below takes; a worker that has lost its parent ends within a second

    def hold():
        with locked(work_directory_of(held / "out")):
            for _ in in_order(lambda: work, [1, 2], 2):
                pass

    child = os.fork()
    if not child:
        try:
            hold()
        finally:
            os._exit(0)
    while not started.exists():
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    run(inputs, held / "out")


def test_it_resumes_where_it_stopped(tmp_path, inputs):
    told = []

    def stop(progress):
        told.append(progress.done)
        if len(told) == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(inputs, tmp_path / "out", on_progress=stop)
    assert not (tmp_path / "out").exists()
    again = []
    result = run(inputs, tmp_path / "out", workers=2, on_progress=lambda progress: again.append(progress.done))
    assert result.resumed
    assert again[0] >= told[-2] > 0
    assert result.dropped == {"binary": 1, "invalid JSON": 1, "duplicate": 30}
    assert not run(inputs, tmp_path / "whole").resumed
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def interrupt(inputs, out) -> None:
    told = []
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background may have been told to ignore it
    with pytest.raises(KeyboardInterrupt):
        run(
            inputs,
            out,
            on_progress=lambda progress: told.append(0) or (len(told) == 10 and signal.raise_signal(signal.SIGINT)),
        )


def test_another_command_does_not_resume_it(tmp_path, inputs):
    interrupt(inputs, tmp_path / "out")
    with pytest.raises(
        ValueError, match=r"interrupted, with another tokenizer \(bytes, now 300\); repeat that command"
    ):
        run(inputs, tmp_path / "out", tokenizer=300)
    (inputs[0] / "e.txt").write_text("A file that was not there before")
    with pytest.raises(ValueError, match=r"with another inputs \(23 files.*now 24 files.*add --restart to start over"):
        run(inputs, tmp_path / "out")
    result = run(inputs, tmp_path / "out", restart=True)
    assert not result.resumed
    run(inputs, tmp_path / "whole")
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_mistake_that_is_found_at_once_is_mended_without_restart(tmp_path, inputs):
    text_key = PrepareConfig(text_key="body")
    with pytest.raises(ValueError, match="set --text-key"):
        prepare([inputs[0] / "b.jsonl.gz"], tmp_path / "out", tokenizer="bytes", settings=text_key, workers=1)
    run([inputs[0] / "b.jsonl.gz"], tmp_path / "out")


def test_what_is_left_of_an_interrupted_one_is_no_dataset(tmp_path, inputs):
    interrupt(inputs, tmp_path / "out")
    left = work_directory_of(tmp_path / "out")
    with pytest.raises(ValueError, match="was never finished: its preparation stopped early; prepare it again"):
        Dataset(left)
    with pytest.raises(FileNotFoundError):
        Dataset(tmp_path / "out")


def test_files_that_became_corrupt_are_not_resumed(tmp_path, inputs):
    interrupt(inputs, tmp_path / "out")
    (work_directory_of(tmp_path / "out") / "train-00000.tokens").write_bytes(b"12")
    with pytest.raises(ValueError, match=r"train-00000.tokens has 2 bytes instead of \d+; .*--restart"):
        run(inputs, tmp_path / "out")


def test_two_processes_at_once(tmp_path, inputs):
    ready, go = os.pipe(), os.pipe()

    def hold():
        with locked(work_directory_of(tmp_path / "out")):
            os.write(ready[1], b"1")
            os.read(go[0], 1)

    child = os.fork()
    if not child:
        try:
            hold()
        finally:
            os._exit(0)
    os.read(ready[0], 1)
    message = re.escape(f"another process is preparing {work_directory_of(tmp_path / 'out')}; wait for it")
    with pytest.raises(ValueError, match=message):
        run(inputs, tmp_path / "out")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    run(inputs, tmp_path / "out")  # the lock of a killed process is free
