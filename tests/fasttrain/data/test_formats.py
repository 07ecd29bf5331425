"""Files of other programs. Each is written here byte by byte, as its program publishes the format:

nanoGPT: https://github.com/karpathy/nanoGPT/blob/master/data/openwebtext/prepare.py
llm.c: https://github.com/karpathy/llm.c/blob/master/dev/data/data_common.py; modded-nanogpt: data/fineweb.py there
Megatron: https://github.com/NVIDIA/Megatron-LM/blob/main/megatron/core/datasets/indexed_dataset.py
"""

from __future__ import annotations

import os
import pickle
import resource
import struct
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from fasttrain.data.batches import IGNORED, Batches
from fasttrain.data.dataset import Dataset
from fasttrain.data.datasets import open_dataset
from fasttrain.data.formats.dataset import Described, ExternalDataset
from fasttrain.data.stream import TokenStream

EOT = 50256
AGAIN = "copy it again, or write it again"


def raw(*tokens: int) -> bytes:
    return b"".join(struct.pack("<H", token) for token in tokens)


def shard(*tokens: int, magic: int = 20240520, version: int = 1, count: int | None = None, form: str = "<H") -> bytes:
    header = struct.pack("<iii", magic, version, len(tokens) if count is None else count) + bytes(253 * 4)
    return header + b"".join(struct.pack(form, token) for token in tokens)


def index(
    lengths: list[int],  # of sequences, in tokens
    bounds: list[int],  # of documents, in sequences
    *,
    magic: bytes = b"MMIDIDX\x00\x00",
    version: int = 1,
    code: int = 8,
    width: int = 2,
) -> bytes:
    offsets = [width * sum(lengths[:number]) for number in range(len(lengths))]
    parts = [magic, struct.pack("<Q", version), struct.pack("<B", code)]
    parts += [struct.pack("<Q", len(lengths)), struct.pack("<Q", len(bounds))]
    parts += [struct.pack("<i", length) for length in lengths]
    parts += [struct.pack("<q", offset) for offset in offsets]
    parts += [struct.pack("<q", bound) for bound in bounds]
    return b"".join(parts)


def write(path: Path, content: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def opened(path: Path, **described) -> ExternalDataset:
    dataset = open_dataset(path, Described(**described))
    assert isinstance(dataset, ExternalDataset)
    return dataset


def tokens_of(dataset: ExternalDataset, split: str = "train") -> list[int]:
    stream = dataset.split(split)
    return stream.windows(np.array([0]), len(stream))[0].tolist()


def fails(path: Path, kind: type[Exception] = ValueError, **described) -> str:
    with pytest.raises(kind) as raised:
        open_dataset(path, Described(**described))
    return str(raised.value)


def batch_of(stream: TokenStream, sequence: int, sequences: int = 1):
    return Batches(stream, sequence=sequence, sequences=sequences, seed=0, document_mask=True).at(0)


# --- nanoGPT


def test_nanogpt(tmp_path):
    write(tmp_path / "train.bin", raw(5, 6, EOT, 7, EOT, 8, 9, 10, EOT))
    write(tmp_path / "val.bin", raw(1, 2, EOT))
    dataset = opened(tmp_path)
    assert tokens_of(dataset) == [5, 6, EOT, 7, EOT, 8, 9, 10, EOT]
    assert tokens_of(dataset, "validation") == [1, 2, EOT]
    assert (dataset.vocab, dataset.separator, dataset.splits) == (50257, EOT, ["train", "validation"])
    assert dataset.bytes_per_token("train") is None
    assert dataset.tokenizer() is None
    assert dataset.tokenizer_digest is None
    assert dataset.notes() == [
        f"{tmp_path}: read as raw tokens of nanoGPT; vocabulary 50257, separator 50256",
        f"{tmp_path}: no data.tokenizer, and so no bits per byte and no sample of text",
    ]
    assert tokens_of(opened(tmp_path / "val.bin")) == [1, 2, EOT]  # a file alone


def test_a_separator_begins_a_document_where_there_is_no_index(tmp_path):
    write(tmp_path / "train.bin", raw(5, 6, EOT, 7, EOT, 8, 9, 10, EOT, 3))
    batch = batch_of(opened(tmp_path).split("train"), 9)
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 8, 9]
    assert batch.positions.tolist() == [[0, 1, 0, 1, 0, 1, 2, 3, 0]]
    assert batch.targets.tolist() == [[6, EOT, 7, EOT, 8, 9, 10, EOT, 3]]  # the end of a text can be predicted


def test_characters_have_no_separator_and_a_vocabulary_that_is_counted(tmp_path):
    write(tmp_path / "train.bin", raw(*range(60)))
    write(tmp_path / "val.bin", raw(3, 64, 9))
    write(tmp_path / "meta.pkl", pickle.dumps({"vocab_size": 65}))
    dataset = opened(tmp_path)
    assert (dataset.vocab, dataset.separator) == (65, None)
    assert "separator none, so that a sample is one text" in dataset.notes()[0]
    assert batch_of(dataset.split("train"), 8, 2).cu_seqlens.tolist() == [0, 8, 16]
    assert opened(tmp_path, vocab=100, separator=3).separator == 3


def test_a_pickle_is_never_read(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)

    write(tmp_path / "train.bin", raw(1, 2, 3))
    write(tmp_path / "meta.pkl", pickle.dumps(Bomb()))
    opened(tmp_path)
    assert not (tmp_path / "exploded").exists()


# --- llm.c and modded-nanogpt


def test_llm_c_and_modded_nanogpt(tmp_path):
    write(tmp_path / "fineweb_train_000002.bin", shard(4, EOT, 5))
    write(tmp_path / "fineweb_train_000001.bin", shard(EOT, 1, 2, EOT, 3))
    write(tmp_path / "fineweb_val_000000.bin", shard(EOT, 9))
    dataset = opened(tmp_path)
    assert tokens_of(dataset) == [EOT, 1, 2, EOT, 3, 4, EOT, 5]
    assert tokens_of(dataset, "validation") == [EOT, 9]
    assert (dataset.vocab, dataset.separator) == (50257, EOT)
    assert batch_of(dataset.split("train"), 7).cu_seqlens.tolist() == [0, 3, 6, 7]
    assert dataset.split("train").windows(np.array([3, 4, 1]), 3).tolist() == [[EOT, 3, 4], [3, 4, EOT], [1, 2, EOT]]
    assert tokens_of(opened(tmp_path / "fineweb_train_000002.bin")) == [4, EOT, 5]


def test_llm_c_with_other_names(tmp_path):
    write(tmp_path / "a" / "tiny_shakespeare_train.bin", shard(EOT, 1, 2))
    write(tmp_path / "a" / "tiny_shakespeare_val.bin", shard(EOT, 3))
    write(tmp_path / "a" / "gpt2_124M.bin", struct.pack("<ii", 20240326, 3) + bytes(2000))  # a model beside them
    assert tokens_of(opened(tmp_path / "a")) == [EOT, 1, 2]
    write(tmp_path / "b" / "fineweb_000000.bin", shard(EOT, 1))
    write(tmp_path / "b" / "fineweb_000001.bin", shard(2))
    assert tokens_of(opened(tmp_path / "b")) == [EOT, 1, 2]


def test_llm_c_with_the_tokens_of_llama_3(tmp_path):
    llama: dict[str, Any] = dict(magic=20240801, version=7, form="<I")
    write(tmp_path / "fineweb_train_000001.bin", shard(128000, 1, 128255, 128000, 70000, **llama))
    dataset = opened(tmp_path)
    assert tokens_of(dataset) == [128000, 1, 128255, 128000, 70000]
    assert (dataset.vocab, dataset.separator) == (128256, 128000)
    assert batch_of(dataset.split("train"), 4).cu_seqlens.tolist() == [0, 3, 4]


def test_another_vocabulary_in_the_same_shards(tmp_path):
    write(tmp_path / "x_train_0.bin", shard(1, 2, 3, 1, 4))
    assert (opened(tmp_path, vocab=1024).vocab, opened(tmp_path, vocab=1024).separator) == (1024, None)
    assert opened(tmp_path, vocab=1024, separator=1).separator == 1
    assert opened(tmp_path, separator=-1).separator is None


# --- Megatron


def megatron(path: Path, *documents: list[int], dtype: str = "<H", **options) -> Path:
    """One sequence for each document, as preprocess_data.py writes it."""
    write(path.with_name(path.name + ".bin"), b"".join(struct.pack(dtype, t) for d in documents for t in d))
    bounds = list(range(len(documents) + 1))
    write(path.with_name(path.name + ".idx"), index([len(d) for d in documents], bounds, **options))
    return path


def test_megatron_by_prefix_by_file_and_by_directory(tmp_path):
    prefix = megatron(tmp_path / "my_text_document", [5, 6, 7], [8], [9, 10])
    for path in (prefix, tmp_path / "my_text_document.bin", tmp_path / "my_text_document.idx", tmp_path):
        dataset = opened(path, vocab=11)
        assert tokens_of(dataset) == [5, 6, 7, 8, 9, 10]
        ends = dataset.split("train").document_ends
        assert (len(ends), ends[np.arange(3)].tolist(), int(ends[-1])) == (3, [3, 4, 6], 6)
    assert (dataset.vocab, dataset.separator, dataset.splits) == (11, None, ["train"])
    assert opened(tmp_path).vocab == 11  # counted


def test_megatron_splits_of_a_directory(tmp_path):
    megatron(tmp_path / "web_train_text_document", [5, 6, 7])
    megatron(tmp_path / "web_valid_text_document", [8, 9])
    assert tokens_of(opened(tmp_path), "validation") == [8, 9]


@pytest.mark.parametrize(
    ("code", "form", "width"), [(1, "<B", 1), (3, "<h", 2), (4, "<i", 4), (5, "<q", 8), (8, "<H", 2)]
)
def test_megatron_types(tmp_path, code, form, width):
    prefix = megatron(tmp_path / "x", [5, 100], [7], dtype=form, code=code, width=width)
    stream = opened(prefix, vocab=101).split("train")
    assert stream.windows(np.array([0]), 3).tolist() == [[5, 100, 7]]
    assert stream.document_ends[np.array([0, 1])].tolist() == [2, 3]


def test_megatron_documents_of_several_sequences_and_of_none(tmp_path):
    write(tmp_path / "x.bin", raw(*range(1, 13)))
    write(tmp_path / "x.idx", index([2, 3, 1, 4, 2], [0, 2, 2, 3, 5]))  # documents end at 5, 5, 6, 12
    stream = opened(tmp_path / "x").split("train")
    ends = np.array([5, 5, 6, 12])
    assert stream.document_ends[np.arange(4)].tolist() == ends.tolist()
    positions = np.arange(14)
    for side in ("left", "right"):
        found = stream.document_ends.searchsorted(positions, side=side)
        assert found.tolist() == ends.searchsorted(positions, side=side).tolist()
    batch = batch_of(stream, 11)
    assert batch.cu_seqlens.tolist() == [0, 5, 6, 11]
    assert batch.targets.tolist() == [[2, 3, 4, 5, IGNORED, IGNORED, 8, 9, 10, 11, 12]]  # no separator to predict


def test_a_separator_that_ends_documents_begins_the_next(tmp_path):
    """preprocess_data.py --append-eod: the same stream as if the separator were written first."""
    prefix = megatron(tmp_path / "x", [5, 6, EOT], [7, EOT], [8, 9, EOT], [1])
    batch = batch_of(opened(prefix).split("train"), 8)
    assert batch.cu_seqlens.tolist() == [0, 2, 4, 7, 8]
    assert batch.targets.tolist() == [[6, EOT, 7, EOT, 8, 9, EOT, 1]]


# --- at any size


def sparse(path: Path, size: int, **places: bytes) -> Path:
    with open(path, "wb") as file:
        file.truncate(size)
        for place, content in places.items():
            file.seek(int(place.removeprefix("at_")))
            file.write(content)
    return path


def cost_of(path: Path, **described) -> tuple[float, float]:
    """Seconds, and MB of memory, to open a dataset and read batches of it."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    stream = opened(path, **described).split("train")
    batch_of(stream, 1024, 16)
    return time.perf_counter() - begin, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def test_a_trillion_tokens_open_at_once(tmp_path):
    n = 10**12
    sparse(tmp_path / "train.bin", 2 * n)
    seconds, megabytes = cost_of(tmp_path, vocab=100)
    assert seconds < 5
    assert megabytes < 100


def test_a_trillion_tokens_of_megatron_open_at_once(tmp_path):
    """An index of 20 GB: each document is 1,000 tokens, and the offsets of those that are read are right."""
    n, documents = 10**12, 10**9
    sparse(tmp_path / "x.bin", 2 * n)
    offsets, bounds = 34 + 4 * documents, 34 + 12 * documents
    sparse(
        tmp_path / "x.idx",
        bounds + 8 * (documents + 1),
        at_0=b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 8, documents, documents + 1),
        **{f"at_{offsets - 4}": struct.pack("<i", 1000)},
        **{f"at_{offsets + 8 * (documents - 1)}": struct.pack("<q", 2 * (n - 1000))},
        **{f"at_{bounds + 8 * documents}": struct.pack("<q", documents)},
    )
    seconds, megabytes = cost_of(tmp_path / "x", vocab=100)
    assert seconds < 5
    assert megabytes < 100
    ends = opened(tmp_path / "x", vocab=100).split("train").document_ends
    assert (len(ends), int(ends[-1])) == (documents, n)


# --- what the files do not say


def tokenizer_at(path: Path, vocab: dict[str, int]) -> Path:
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return path


def test_a_tokenizer_gives_vocabulary_separator_and_bytes(tmp_path):
    write(tmp_path / "train.bin", raw(1, 2, 3, 1))
    tokenizer = tokenizer_at(tmp_path / "t.json", {"?": 0, "ab": 1, "cde": 2, "<|endoftext|>": 3})
    dataset = opened(tmp_path, tokenizer=tokenizer)
    assert (dataset.vocab, dataset.separator) == (4, 3)
    assert dataset.tokenizer().encode("cde ab").ids == [2, 1]
    assert dataset.bytes_per_token("train") == len("ab cde <|endoftext|> ab") / 4
    assert dataset.tokenizer_digest == opened(tmp_path, tokenizer=tokenizer).tokenizer_digest
    assert len(dataset.notes()) == 1


def test_the_digest_is_of_the_content(tmp_path):
    def digest(*tokens: int, **described) -> str:
        write(tmp_path / "train.bin", raw(*tokens))
        return opened(tmp_path, **described).digest

    assert digest(1, 2, EOT) == digest(1, 2, EOT)
    others = [digest(1, 3, EOT), digest(1, 2, EOT, 4), digest(1, 2, EOT, separator=2), digest(1, 2, EOT, vocab=60000)]
    assert len({digest(1, 2, EOT), *others}) == 5


def test_a_prepared_dataset_is_ours_whatever_lies_beside_it(make_dataset):
    dataset = make_dataset([4])
    write(dataset.path / "train.bin", raw(1, 2))
    assert isinstance(open_dataset(dataset.path), Dataset)


# --- what is wrong with a file


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("train.bin", b"", "is empty; " + AGAIN),
        (
            "train.bin",
            raw(1, 2) + b"\x01",
            "has 5 bytes, which is no whole number of uint16 tokens: truncated, or not tokens; " + AGAIN,
        ),
        (
            "model.bin",
            raw(1, 2),
            "has no header of llm.c (it begins with 01 00 02 00); if it is tokens without header, call it train.bin or "
            "val.bin",
        ),
        (
            "a_train_0.bin",
            shard(1, 2, 3, count=4),
            "has 1030 bytes instead of 1032, for 4 tokens of uint16: truncated, or still being copied; " + AGAIN,
        ),
        (
            "a_train_0.bin",
            shard(1, 2, 3, count=2),
            "has 1030 bytes instead of 1028, for 2 tokens of uint16: it holds more than its header says; " + AGAIN,
        ),
        ("a_train_0.bin", shard(count=0), "has 0 tokens by its header; " + AGAIN),
        ("a_train_0.bin", shard(1)[:100], "has 100 bytes, less than its header of 1024: truncated; " + AGAIN),
        (
            "a_train_0.bin",
            shard(1, version=3),
            "has version 3 of format 20240520, fasttrain reads version 1; write it again with that version",
        ),
        (
            "a_train_0.bin",
            shard(1, magic=20240326),
            "begins with 20240326 and is of no kind that fasttrain reads; token files of llm.c begin with 20240520 or "
            "20240801",
        ),
        (
            "a_train_0.bin",
            shard(1, magic=20240522),
            "begins with 20240522 and holds questions, not text; token files of llm.c begin with 20240520 or 20240801",
        ),
    ],
)
def test_a_file_that_is_not_whole_or_not_tokens(tmp_path, name, content, message):
    file = write(tmp_path / name, content)
    for path in (tmp_path, file):
        assert fails(path) == f"dataset: {file} {message}"


def test_files_of_another_kind(tmp_path):
    torch.save({"weight": torch.zeros(3)}, tmp_path / "model.pt")
    torch.save({"weight": torch.zeros(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    np.save(tmp_path / "tokens.npy", np.zeros(3))
    with zipfile.ZipFile(tmp_path / "train.bin", "w") as file:
        file.writestr("a", "b")
    remedy = "not tokens; prepare its text first, or write its tokens as uint16 to train.bin"
    for name, meaning in [
        ("model.pt", "a zip archive, as torch.save and numpy.savez write"),
        ("train.bin", "a zip archive, as torch.save and numpy.savez write"),
        ("old.pt", "a pickle of torch.save"),
        ("tokens.npy", "a NumPy file, with a header"),
    ]:
        assert fails(tmp_path / name) == f"dataset: {tmp_path / name} is {meaning}, {remedy}"


def test_files_that_do_not_belong_together(tmp_path):
    raw_file, llm_c = write(tmp_path / "val.bin", raw(1, 2)), write(tmp_path / "train.bin", shard(1, 2))
    assert fails(tmp_path) == (
        f"dataset: {raw_file} (no header) and {llm_c} (format 20240520) do not belong together; keep them in "
        "directories of their own"
    )


def test_validation_data_alone(tmp_path):
    write(tmp_path / "val.bin", raw(1, 2))
    assert fails(tmp_path) == (
        f"dataset: {tmp_path} holds validation data only: val.bin; name the file in validation.sets"
    )
    megatron(tmp_path / "m" / "a_val", [1])
    assert fails(tmp_path / "m") == (
        f"dataset: {tmp_path / 'm'} holds validation data only: a_val; name it in validation.sets"
    )


def test_half_a_dataset_of_megatron(tmp_path):
    prefix = megatron(tmp_path / "x", [1, 2])
    (tmp_path / "x.bin").rename(tmp_path / "y.bin")
    message = f"dataset: {tmp_path}/x.bin is missing, which {tmp_path}/x.idx belongs to (Megatron); copy both"
    for path in (prefix, tmp_path / "x.idx", tmp_path):
        assert fails(path, FileNotFoundError) == message
    message = f"dataset: {tmp_path}/y.idx is missing, which {tmp_path}/y.bin belongs to (Megatron); copy both"
    assert fails(tmp_path / "y", FileNotFoundError) == message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with b'' instead of b'MMIDIDX\\x00\\x00': not an index of Megatron; " + AGAIN),
        (
            index([3], [0, 1], magic=b"TNTIDX\x00\x00\x00"),
            "begins with b'TNTIDX\\x00\\x00\\x00' instead of b'MMIDIDX\\x00\\x00': not an index of Megatron; " + AGAIN,
        ),
        (index([3], [0, 1])[:20], "has 20 bytes: truncated; " + AGAIN),
        (index([3], [0, 1], version=2), "has version 2, fasttrain reads version 1; write it again with that"),
        (
            index([3], [0, 1], code=7),
            "has tokens of type 7; tokens are integers: uint8 (1), int8 (2), int16 (3), int32 (4), int64 (5), "
            "uint16 (8)",
        ),
        (index([], [0]), "has 0 sequences in 0 documents: empty; " + AGAIN),
        (
            index([3], [0, 1])[:-1],
            "has 61 bytes instead of 62, for 1 sequences in 1 documents: truncated, or still being copied; " + AGAIN,
        ),
        (
            index([3], [0, 1]) + b"\0",
            "has 63 bytes instead of 62, for 1 sequences in 1 documents: it holds more, as of several modes; " + AGAIN,
        ),
    ],
)
def test_an_index_that_is_not_whole_or_not_megatrons(tmp_path, content, message):
    write(tmp_path / "x.bin", raw(1, 2, 3))
    write(tmp_path / "x.idx", content)
    assert fails(tmp_path / "x") == f"dataset: {tmp_path}/x.idx {message}"


def test_an_index_of_other_tokens(tmp_path):
    write(tmp_path / "x.bin", raw(1, 2, 3))
    write(tmp_path / "x.idx", index([3, 1], [0, 1, 2]))
    assert fails(tmp_path / "x") == (
        f"dataset: {tmp_path}/x.bin has 6 bytes instead of 8 by {tmp_path}/x.idx: truncated, or they do not belong "
        "together; copy both again"
    )
    write(tmp_path / "x.idx", index([2, 1], [0, 1]))
    assert fails(tmp_path / "x") == (
        f"dataset: {tmp_path}/x.idx has documents from sequence 0 to 1, but 2 sequences; {AGAIN}"
    )


def test_several_datasets_of_megatron_in_a_directory(tmp_path):
    megatron(tmp_path / "a", [1])
    megatron(tmp_path / "b", [1])
    assert fails(tmp_path) == (
        f"dataset: {tmp_path} holds several datasets of Megatron: a and b; name one of them ({tmp_path}/b), or mix "
        "them (data.mixture)"
    )


def test_tokens_and_separators_outside_the_vocabulary(tmp_path):
    write(tmp_path / "train.bin", raw(1, 70, 3))
    assert fails(tmp_path, vocab=70) == (
        f"dataset: {tmp_path} has tokens from 1 to 70 in train, outside the vocabulary of 70; set data.vocab or "
        "data.tokenizer to what made them"
    )
    assert fails(tmp_path, vocab=71, separator=71) == (
        f"data.separator (71) is not a token of the vocabulary of 71 ({tmp_path}); set it to the token between "
        "documents, or to -1 if there is none"
    )
    write(tmp_path / "x.json", b"{}")
    assert f"data.tokenizer: {tmp_path}/x.json is no tokenizer.json of Hugging Face tokenizers (" in fails(
        tmp_path, tokenizer=tmp_path / "x.json"
    )


def test_a_large_file_whose_vocabulary_nobody_knows(tmp_path):
    write(tmp_path / "train.bin", raw(7) * (2**24 + 1))
    message = (
        f"dataset: {tmp_path} does not say how large its vocabulary is, and a sample goes up to 7 without GPT-2's "
        "separator 50256; set data.vocab, and data.separator if there is a token between documents"
    )
    assert fails(tmp_path) == message
    write(tmp_path / "meta.pkl", b"")
    hint = "data.vocab (meta.pkl has it as vocab_size, but a pickle can run any program, and is not read here)"
    assert fails(tmp_path) == message.replace("data.vocab", hint)
    assert opened(tmp_path, vocab=8).vocab == 8
