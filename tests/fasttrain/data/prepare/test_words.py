"""The quick encoder gives what the library gives, whatever the text."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from fasttrain.data.prepare import encoder as encoders
from fasttrain.data.prepare import words
from fasttrain.data.prepare.encoder import Encoder, _Library
from fasttrain.data.prepare.tokenizer import SEPARATOR, Vocabulary, plain_bytes, trained_on

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


def variant(name: str) -> Vocabulary:
    """As trained_on makes it, or with the parts of other tokenizers."""
    plain = trained_on(TRAINING, 600)
    tokenizer = Tokenizer.from_str(plain.json)
    if name == "llama3":
        tokenizer.pre_tokenizer = split_by(words.LLAMA3)
    if name == "qwen":
        tokenizer.pre_tokenizer = split_by(words.QWEN)
        tokenizer.normalizer = normalizers.NFC()
    if name == "added":
        tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return plain._replace(json=tokenizer.to_str())


@pytest.fixture(scope="module", params=["trained", "llama3", "qwen", "added"])
def pair(request) -> tuple[Encoder, _Library]:
    vocabulary = variant(request.param)
    encoder = Encoder(vocabulary, U2)
    assert isinstance(encoder.encode.__self__, encoders._Words)  # the quick way is taken
    return encoder, _Library(vocabulary.json, U2)


def test_texts_that_are_cut_in_strange_ways(pair):
    encoder, library = pair
    assert encoder.encode(TROUBLE) == library.encode(TROUBLE)
    assert encoder.encode(TROUBLE) == library.encode(TROUBLE)  # from memory


@settings(max_examples=150, deadline=None)
@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"])), max_size=4))
def test_any_text(pair, texts):
    encoder, library = pair
    assert encoder.encode(texts) == library.encode(texts)


@settings(max_examples=150, deadline=None)
@given(text=st.text(st.sampled_from(" \t\r\n'_a\u017fsSreLl1½٣-.\x1c\u0301é日🎉")))
def test_any_text_of_characters_that_patterns_tell_apart(pair, text):
    encoder, library = pair
    assert encoder.encode([text]) == library.encode([text])


def test_every_character_is_what_the_library_takes_it_for_or_left_to_it():
    vocabulary = variant("llama3")
    encoder, library = Encoder(vocabulary, U2), _Library(vocabulary.json, U2)
    codes = [*range(0x80, 0x3000), *range(0x3000, 0xD800, 16), *range(0xE000, 0x33000, 16)]
    odd = words._odd("".join(map(chr, codes)))
    assert "½" in odd
    letters = [chr(code) for code in codes if chr(code) not in odd]
    assert len(letters) > 0.9 * 0x3000
    text = "".join(f" a{letter}1{letter}" for letter in letters)
    assert encoder.encode([text]) == library.encode([text])


def test_memory_for_words_is_bounded(monkeypatch):
    monkeypatch.setattr(encoders, "WORDS", 50)
    monkeypatch.setattr(encoders, "TOGETHER", 100)
    encoder = Encoder(trained_on(TRAINING, 600), U2)
    library = _Library(trained_on(TRAINING, 600).json, U2)
    texts = [f"word{'x' * i} {'y' * 70}" for i in range(60)]
    assert encoder.encode(texts) == library.encode(texts)
    known = encoder.encode.__self__._known
    assert len(known) < 60
    assert not any(len(word) > encoders.LONG for word in known)


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
    encoder = Encoder(vocabulary._replace(json=json.dumps(description)), U2)
    assert isinstance(encoder.encode.__self__, _Library)
    ids = np.frombuffer(encoder.encode([f"spelled {SEPARATOR} here"])[0], U2)
    assert len(ids) > 5
    assert vocabulary.separator not in ids


def test_plain_bytes_are_what_the_library_makes_of_its_file():
    vocabulary = plain_bytes()
    assert (vocabulary.size, vocabulary.separator) == (257, 256)
    encoder, library = Encoder(vocabulary, U2), _Library(vocabulary.json, U2)
    assert not isinstance(getattr(encoder.encode, "__self__", None), _Library)
    assert encoder.encode(TROUBLE) == library.encode(TROUBLE)
    assert np.frombuffer(encoder.encode(["é\0"])[0], U2).tolist() == [0xC3, 0xA9, 0]


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"])))
def test_tokens_decode_to_the_text(text):
    for vocabulary, encoder, tokenizer in KINDS:
        ids = np.frombuffer(encoder.encode([text])[0], U2).tolist()
        assert vocabulary.separator not in ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


KINDS = [(v, Encoder(v, U2), Tokenizer.from_str(v.json)) for v in (trained_on(TRAINING, 400), plain_bytes())]
