"""Text as its tokens come: nothing incomplete is shown, and nothing is lost."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from fasttrain.tools.generate import TextStream

WORDS = "naïve café 東京 🙂👩‍🚀 x = 1\n\tend"


def tokenizer_of_bytes() -> Tokenizer:
    """A token for each byte: characters beyond ASCII come in pieces."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return made


def streamed(tokenizer: Tokenizer, ids: list[int], together: int = 1) -> list[str]:
    stream = TextStream(tokenizer)
    pieces = [stream.add(ids[first : first + together]) for first in range(0, len(ids), together)]
    return [*pieces, stream.rest()]


@pytest.mark.parametrize("together", [1, 2, 5])
def test_characters_are_shown_whole(together):
    tokenizer = tokenizer_of_bytes()
    pieces = streamed(tokenizer, tokenizer.encode(WORDS).ids, together)
    assert "".join(pieces) == WORDS
    assert not any("\ufffd" in piece for piece in pieces)
    assert pieces[-1] == ""


def test_pieces_come_as_soon_as_they_can():
    tokenizer = tokenizer_of_bytes()
    assert streamed(tokenizer, tokenizer.encode("aéb").ids) == ["a", "", "é", "b", ""]


def test_what_stays_incomplete_comes_last():
    tokenizer = tokenizer_of_bytes()
    ids = tokenizer.encode("a東").ids[:-1]
    pieces = streamed(tokenizer, ids)
    assert pieces[:-1] == ["a", "", ""]
    assert "".join(pieces) == tokenizer.decode(ids)


def test_any_bytes_at_all():
    """Also those that are no text: as the whole is decoded."""
    tokenizer = tokenizer_of_bytes()
    draw = random.Random(0)
    for _ in range(200):
        ids = [draw.randrange(256) for _ in range(12)]
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


def test_spaces_between_words_that_tokens_do_not_have():
    made = Tokenizer(models.WordPiece({"[UNK]": 0, "to": 1, "##day": 2, "is": 3}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece()
    assert streamed(made, [1, 2, 3, 1]) == ["to", "day", " is", " to", ""]
