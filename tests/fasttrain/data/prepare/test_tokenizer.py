"""Tokenizers from files: which token separates documents, and what is wrong with a file."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, processors

from fasttrain.data import Dataset
from fasttrain.data.prepare import Settings, prepare
from fasttrain.data.prepare.tokenizer import loaded, plain_bytes, trained_on

TEXTS = ["a first text of words", "a second text of other words", "</s> spelled out <s>"] * 3


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The directory of a model whose tokenizer adds tokens of its own, cuts texts off, and pads them."""
    tokenizer = Tokenizer.from_str(trained_on(TEXTS, 300, separator="<|endoftext|>").json)
    tokenizer.add_special_tokens(["<s>", "</s>", "<|im_end|>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        special_tokens=[("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))],
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    (tmp_path / "model").mkdir()
    tokenizer.save(str(tmp_path / "model" / "tokenizer.json"))
    return tmp_path / "model"


def test_one_separator_whatever_the_tokenizer_adds_by_itself(tmp_path, model):
    texts = list(dict.fromkeys(TEXTS))
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(text) for text in texts))
    for separator in ("</s>", "<|im_end|>", None):
        out = tmp_path / f"out {separator}"
        prepare(
            [tmp_path / "x.jsonl"],
            out,
            tokenizer=model,
            separator=separator,
            settings=Settings(validation=0),
            workers=1,
        )
        dataset = Dataset(out)
        assert dataset.separator == dataset.tokenizer().token_to_id(separator or "<|endoftext|>")
        stream = dataset.split("train")
        tokens = stream.windows(np.array([0]), len(stream))[0]
        found = np.split(tokens, stream.document_ends[:-1])
        assert [piece[0] for piece in found] == [dataset.separator] * len(texts)
        decoded = [dataset.tokenizer().decode(piece[1:].tolist(), skip_special_tokens=False) for piece in found]
        assert decoded == texts


def test_the_separator_is_found_by_the_files_beside_or_by_its_name(tmp_path, model):
    assert loaded(model).separator_text == "<|endoftext|>"
    for eos in ("<|im_end|>", {"content": "<|im_end|>"}):
        (model / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
        assert loaded(model / "tokenizer.json").separator_text == "<|im_end|>"
    (model / "dataset.json").write_text(json.dumps({"separator": loaded(model, separator="</s>").separator}))
    assert loaded(model).separator_text == "</s>"
    assert loaded(model, separator="<s>").separator_text == "<s>"


def test_a_separator_that_is_not_there_is_told_with_those_there_are(tmp_path, model):
    with pytest.raises(
        ValueError, match=r"has no token '<end>'; set --separator, .*: <\|endoftext\|>, <s>, </s>, <\|im_end"
    ):
        loaded(model, separator="<end>")
    nameless = Tokenizer.from_str(plain_bytes(separator="<end>").json)
    nameless.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="does not say which token separates documents; set --separator.*: <end>"):
        loaded(tmp_path)


def test_files_that_are_no_tokenizer(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no tokenizer .*; name a tokenizer.json, .* or 'bytes'"):
        loaded(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ValueError, match="tokenizer.json is no tokenizer.json of Hugging Face tokenizers"):
        loaded(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes(b"\xff\xff")
    with pytest.raises(ValueError, match="tokenizer.json is no tokenizer.json of Hugging Face tokenizers"):
        loaded(tmp_path)


def test_a_vocabulary_too_small_for_bytes():
    with pytest.raises(ValueError, match="a vocabulary of 100 has no room for 256 bytes and the separator"):
        trained_on(TEXTS, 100)


def test_a_vocabulary_with_gaps_ends_after_its_last_token(tmp_path):
    tokenizer = Tokenizer.from_str(trained_on(TEXTS, 300).json)
    description = json.loads(tokenizer.to_str())
    description["added_tokens"].append(
        dict(id=70_000, content="<far>", special=True, single_word=False, lstrip=False, rstrip=False, normalized=False)
    )
    description["model"]["vocab"]["<far>"] = 70_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    assert loaded(tmp_path).size == 70_001
    (tmp_path / "x.txt").write_text("a text that takes four bytes for each token")
    prepare([tmp_path / "x.txt"], tmp_path / "out", tokenizer=tmp_path, settings=Settings(validation=0), workers=1)
    assert Dataset(tmp_path / "out").manifest.dtype == "uint32"


def test_a_separator_that_text_can_make_is_refused(tmp_path):
    tokenizer = Tokenizer.from_str(trained_on(TEXTS, 300).json)
    tokenizer.add_tokens([AddedToken("words", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(text) for text in TEXTS))
    with pytest.raises(ValueError, match="the tokenizer makes the separator 'words' of other text; choose another"):
        prepare([tmp_path / "x.jsonl"], tmp_path / "out", tokenizer=tmp_path, separator="words", workers=1)
