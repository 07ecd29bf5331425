"""Tokenizers from files, and an encoder that gives what the library gives, whatever the text."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers, processors

from fasttrain.config import PrepareConfig
from fasttrain.data.dataset import Dataset
from fasttrain.data.prepare import prepare
from fasttrain.data.prepare import tokenizer as tokenizers
from fasttrain.data.prepare.tokenizer import (
    SEPARATOR,
    Characters,
    TokenizerSpec,
    _Library,
    encoder_of,
    loaded,
    plain_bytes,
    trained_on,
)

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
            settings=PrepareConfig(validation=0),
            workers=1,
        )
        dataset = Dataset(out)
        assert dataset.separator == dataset.tokenizer().token_to_id(separator or "<|endoftext|>")
        stream = dataset.split("train")
        tokens = stream.windows(np.array([0]), len(stream))[0]
        found = np.split(tokens, stream.document_ends[:-1])
        assert [chunk[0] for chunk in found] == [dataset.separator] * len(texts)
        decoded = [dataset.tokenizer().decode(chunk[1:].tolist(), skip_special_tokens=False) for chunk in found]
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
    with pytest.raises(ValueError, match="a vocabulary of 100 is too small for 256 bytes and the separator"):
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
    prepare([tmp_path / "x.txt"], tmp_path / "out", tokenizer=tmp_path, settings=PrepareConfig(validation=0), workers=1)
    assert Dataset(tmp_path / "out").manifest.dtype == "uint32"


def test_a_separator_that_text_can_make_is_refused(tmp_path):
    tokenizer = Tokenizer.from_str(trained_on(TEXTS, 300).json)
    tokenizer.add_tokens([AddedToken("words", special=False)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps(text) for text in TEXTS))
    with pytest.raises(ValueError, match="the tokenizer makes the separator 'words' of other text; choose another"):
        prepare([tmp_path / "x.jsonl"], tmp_path / "out", tokenizer=tmp_path, separator="words", workers=1)


U2 = np.dtype("<u2")
TRAINING = [
    "It's the 2nd time they'll say we've tried; I'm sure he'd be 1234567 in   all.\n\n",
    "\tdef f(x):\n        return x_1 + 22\n",
    "Größe, naïve café — “curly” quotes… 日本語のテキスト и немного русского текста 🎉🎉 ½ ² Ⅷ \r\n\r\n  end\n",
] * 4
TROUBLE = [
    "", " ", "\n", "  x", "x  ", "a\n\n b", "\r\n\r\n\tx", "'s's'S'\u017f'LL'Ll 'll", "_a__b_1_", "x_y", "½²Ⅷ①",
    "\x1c\x1d a \x1f", "\x85\xa0\u2003\u3000x", "e\u0301 a\u0308 Å", "١٢٣ 123456789", "\u200b\u00ad", "\ufeffx",
    "\U0001f9ff\U0001fae8\U0002ebf0\U000105c0", SEPARATOR, f"a{SEPARATOR}b", "<tool>", "a <tool>b", "A" * 300,
    "ǅǅ ʰ ª", "\x00\x01", "\u0d4e\u1cf2 \u1885",
]  # fmt: skip


def split_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def variant(name: str) -> TokenizerSpec:
    """As trained_on makes it, or with the parts of other tokenizers."""
    plain = trained_on(TRAINING, 600)
    tokenizer = Tokenizer.from_str(plain.json)
    if name == "llama3":
        tokenizer.pre_tokenizer = split_by(tokenizers.LLAMA3)
    if name == "qwen":
        tokenizer.pre_tokenizer = split_by(tokenizers.QWEN)
        tokenizer.normalizer = normalizers.NFC()
    if name == "added":
        tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return plain._replace(json=tokenizer.to_str())


@pytest.fixture(scope="module", params=["trained", "llama3", "qwen", "added"])
def pair(request) -> tuple[Callable[[list[str]], list[bytes]], _Library]:
    vocabulary = variant(request.param)
    encoder = encoder_of(vocabulary, U2)
    assert isinstance(getattr(encoder, "__self__", None), tokenizers._Words)  # the quick way is taken
    return encoder, _Library(vocabulary.json, U2)


def test_texts_that_are_cut_in_strange_ways(pair):
    encoder, library = pair
    assert encoder(TROUBLE) == library.encode(TROUBLE)
    assert encoder(TROUBLE) == library.encode(TROUBLE)  # from memory


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4))
def test_any_text(pair, texts):
    encoder, library = pair
    assert encoder(texts) == library.encode(texts)


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.sampled_from(" \t\r\n'_a\u017fsSreLl1½٣-.\x1c\u0301é日🎉")))
def test_any_text_of_characters_that_patterns_tell_apart(pair, text):
    encoder, library = pair
    assert encoder([text]) == library.encode([text])


def test_every_character_is_what_the_library_takes_it_for_or_left_to_it():
    vocabulary = variant("llama3")
    encoder, library = encoder_of(vocabulary, U2), _Library(vocabulary.json, U2)
    codes = [*range(0x80, 0x3000), *range(0x3000, 0xD800, 16), *range(0xE000, 0x33000, 16)]
    characters = Characters()
    assert characters.has_odd("".join(map(chr, codes)))
    odd = characters._odd
    assert "½" in odd
    letters = [chr(code) for code in codes if chr(code) not in odd]
    assert len(letters) > 0.9 * 0x3000
    text = "".join(f" a{letter}1{letter}" for letter in letters)
    assert encoder([text]) == library.encode([text])


def test_memory_for_words_is_bounded(monkeypatch):
    monkeypatch.setattr("fasttrain.data.prepare.tokenizer.CACHED_WORDS", 50)
    monkeypatch.setattr("fasttrain.data.prepare.tokenizer.BATCH_CHARACTERS", 100)
    encoder = encoder_of(trained_on(TRAINING, 600), U2)
    library = _Library(trained_on(TRAINING, 600).json, U2)
    texts = [f"word{'x' * i} {'y' * 70}" for i in range(60)]
    assert encoder(texts) == library.encode(texts)
    known = encoder.__self__._known  # type: ignore[attr-defined]
    assert len(known) < 60
    assert not any(len(word) > tokenizers.MAX_CACHED_WORD for word in known)


@pytest.mark.parametrize(
    "change",
    [
        dict(normalizer=dict(type="Lowercase")),
        dict(pre_tokenizer=None),
        dict(pre_tokenizer=dict(type="ByteLevel", add_prefix_space=True, trim_offsets=True, use_regex=True)),
        dict(pre_tokenizer=dict(type="Whitespace")),
    ],
)
def test_other_tokenizers_are_left_to_the_library(change):
    vocabulary = trained_on(TRAINING, 400)
    description = json.loads(vocabulary.json) | change
    encoder = encoder_of(vocabulary._replace(json=json.dumps(description)), U2)
    assert isinstance(getattr(encoder, "__self__", None), _Library)
    ids = np.frombuffer(encoder([f"spelled {SEPARATOR} here"])[0], U2)
    assert len(ids) > 5
    assert vocabulary.separator not in ids


def test_plain_bytes_are_what_the_library_makes_of_its_file():
    vocabulary = plain_bytes()
    assert (vocabulary.size, vocabulary.separator) == (257, 256)
    encoder, library = encoder_of(vocabulary, U2), _Library(vocabulary.json, U2)
    assert not isinstance(getattr(encoder, "__self__", None), _Library)
    assert encoder(TROUBLE) == library.encode(TROUBLE)
    assert np.frombuffer(encoder(["é\0"])[0], U2).tolist() == [0xC3, 0xA9, 0]


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_tokens_decode_to_the_text(text):
    for vocabulary, encoder, tokenizer in KINDS:
        ids = np.frombuffer(encoder([text])[0], U2).tolist()
        assert vocabulary.separator not in ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


KINDS = [(v, encoder_of(v, U2), Tokenizer.from_str(v.json)) for v in (trained_on(TRAINING, 400), plain_bytes())]
