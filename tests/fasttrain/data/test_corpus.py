import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fasttrain.data import corpus
from fasttrain.data.corpus import standard_library
from fasttrain.data.dataset import Dataset, SourceFile
from fasttrain.data.datasets import open_dataset
from fasttrain.data.prepare.tokenizer import SEPARATOR
from fasttrain.data.writer import holds_out

NAME = f"stdlib-{platform.python_version()}-bpe4096-v{corpus.RECIPE}"


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A small standard library."""
    files = {f"package{i % 7}/module{i}.py": f"def function{i}(x):\n    return x + {i * 37}  # é\n" for i in range(150)}
    files |= {"spells.py": f"SEPARATOR = '{SEPARATOR}'\n", "empty.py": "", "blank.py": "\n  \n"}
    excluded = {f"{name}/secret.py": "secret = 'not to be read'\n" for name in corpus.EXCLUDED}
    for name, text in (
        files | excluded | {"package1/test/secret.py": "secret = 2\n", "notes.txt": "no source"}
    ).items():
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_text(text, "utf-8")
    (tmp_path / "lib" / "latin1.py").write_bytes(b"# caf\xe9\n")
    return tmp_path / "lib"


def documents(dataset: Dataset, split: str) -> list[str]:
    stream, tokenizer = dataset.split(split), dataset.tokenizer()
    tokens = stream.windows(np.array([0]), len(stream))[0]
    parts = np.split(tokens, stream.document_ends[:-1])
    assert all(part[0] == dataset.separator and not (part[1:] == dataset.separator).any() for part in parts)
    return [tokenizer.decode(part[1:].tolist(), skip_special_tokens=False) for part in parts]


def test_documents_come_back_whole_each_in_one_split(tmp_path, sources):
    path = standard_library(tmp_path / "cache", sources=sources)
    assert path == tmp_path / "cache" / NAME
    dataset = Dataset(path)
    dataset.verify()
    train, validation = documents(dataset, "train"), documents(dataset, "validation")
    wanted = [text for _, text in corpus._texts(sources)]
    assert len(wanted) == 151  # nothing excluded, empty, blank or not UTF-8
    assert sorted(train + validation) == sorted(wanted)
    assert train == [text for text in wanted if not holds_out(text.encode(), corpus.VALIDATION)]  # in order of paths
    assert 0 < len(validation) < 15
    for split, texts in (("train", train), ("validation", validation)):
        for document in (0, len(texts) - 1):
            source = dataset.source(split, document)
            assert source.file.path.read_text("utf-8") == texts[document]
            assert (source.offset, source.size, source.line) == (0, len(texts[document].encode()), 1)
            assert source.file == SourceFile.at(source.file.path)
    sizes = {
        name: sum(len(text.encode()) for text in texts)
        for name, texts in dict(train=train, validation=validation).items()
    }
    for name, size in sizes.items():
        assert dataset.bytes_per_token(name) * len(dataset.split(name)) == pytest.approx(size)


def test_documents_keep_their_split_when_others_are_added(tmp_path, sources):
    before = Dataset(standard_library(tmp_path / "one", sources=sources))
    for i in range(40):
        (sources / f"added{i}.py").write_text(f"added = {i}\n")
    after = Dataset(standard_library(tmp_path / "two", sources=sources))
    for split in ("train", "validation"):
        assert set(documents(before, split)) <= set(documents(after, split))


def test_it_is_built_once_and_the_same_everywhere(tmp_path, sources, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("sysconfig.get_path", lambda name: str(sources))
    first = open_dataset()
    assert first.path == tmp_path / "cache" / "fasttrain" / NAME
    captured = capsys.readouterr()
    assert captured.err == f"preparing the default dataset, once: {first.path}\n"
    assert not captured.out
    monkeypatch.setattr(corpus, "_build", None)
    assert open_dataset().digest == first.digest
    monkeypatch.undo()
    other = Dataset(standard_library(tmp_path / "other", sources=sources))
    assert other.digest == first.digest


def test_the_vocabulary_is_the_tokenizers(tmp_path, sources):
    dataset = Dataset(standard_library(tmp_path, sources=sources))
    tokenizer = dataset.tokenizer()
    assert dataset.vocab == tokenizer.get_vocab_size() <= corpus.VOCAB
    assert tokenizer.token_to_id(SEPARATOR) == dataset.separator
    text = "any bytes: \x00 \u2603 \U0001f40d"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_a_python_without_sources_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(FileNotFoundError) as raised:
        standard_library(tmp_path / "cache", sources=tmp_path)
    message = f"dataset: no Python sources in {tmp_path}, of which the default dataset is made; set data.path"
    assert str(raised.value) == message


def test_what_killed_builds_left_is_removed_by_the_next(tmp_path, sources):
    left = tmp_path / "cache" / f".{NAME}.partial-12345678"
    left.mkdir(parents=True)
    (left / "train-00000.tokens").write_bytes(b"12")
    standard_library(tmp_path / "cache", sources=sources)
    assert sorted(path.name for path in (tmp_path / "cache").iterdir()) == [NAME, f"{NAME}.lock"]


def test_without_locks_the_first_to_complete_wins(tmp_path, sources, monkeypatch):
    def fail(*_):
        raise OSError("no locks")

    def slow(path, sources, build=corpus._build):
        build(path, sources)  # another process
        (path / "dataset.json").write_text(winner := (path / "dataset.json").read_text() + "\n")
        monkeypatch.setattr(corpus, "_build", build)
        try:
            build(path, sources)
        finally:
            assert (path / "dataset.json").read_text() == winner

    monkeypatch.setattr("fcntl.flock", fail)
    monkeypatch.setattr(corpus, "_build", slow)
    Dataset(standard_library(tmp_path / "cache", sources=sources)).verify()


BUILD = """
import sys
from pathlib import Path
from fasttrain.data.corpus import standard_library
from fasttrain.data.dataset import Dataset
dataset = Dataset(standard_library(Path(sys.argv[1]), sources=Path(sys.argv[2])))
dataset.verify()
print(dataset.digest)
"""


def test_processes_that_start_together_share_one_build(tmp_path, sources):
    command = [sys.executable, "-c", BUILD, str(tmp_path / "cache"), str(sources)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    processes = [subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0]
    assert sum("preparing" in errors for _, errors in outputs) == 1
    description = json.loads((tmp_path / "cache" / NAME / "dataset.json").read_text())
    assert sorted(os.listdir(tmp_path / "cache")) == [NAME, f"{NAME}.lock"]
    assert description["source"] == f"the standard library of Python {platform.python_version()}, {sources}"
