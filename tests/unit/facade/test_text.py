"""Text of samples that grow."""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from services.contracts.errors import InvalidArgument
from services.facade.text import TemplateTraits, TextStream, needs_text, text_of


class Bytes:
    """A tokenizer whose tokens are bytes, and 0 is special."""

    def encode(self, text: str, special: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special: bool) -> str:
        return bytes(token for token in token_ids if token or not skip_special).decode(errors="replace")

    def token(self, token_id: int) -> str:
        return self.decode([token_id], False)

    def template(self) -> TemplateTraits:
        raise AssertionError("not used")

    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        raise AssertionError("not used")


def test_a_character_of_several_tokens_comes_when_it_is_whole() -> None:
    tokens = list("aé€😀b".encode())
    stream = TextStream(Bytes(), skip_special=True)
    pieces = [stream.grow(tokens[: n + 1], ended=n + 1 == len(tokens)) for n in range(len(tokens))]
    assert "".join(pieces) == "aé€😀b"
    assert pieces[:3] == ["a", "", "é"]
    assert not any("\ufffd" in piece for piece in pieces)


@pytest.mark.parametrize("size", [1, 2, 3, 20])
def test_no_part_of_a_stop_string_is_given_before_it_is_known(size: int) -> None:
    tokens, stop = list("aé</b> and </a>".encode()), "</a>"
    stream, text = TextStream(Bytes(), skip_special=True, stop=[stop, "b"]), ""
    for end in range(size, len(tokens) + size, size):
        ended = end >= len(tokens)
        text += stream.grow(tokens[:end], ended, stop if ended else "")
        assert "aé</b> and ".startswith(text)
    assert text == "aé</b> and " == text_of(Bytes(), tokens, True, stop)


@pytest.mark.parametrize("stop", ["\n", "</a>"])
def test_the_token_that_completes_a_stop_string_may_come_before_the_end(stop: str) -> None:
    words = ["one ", "two", f".{stop}\n", f"x{stop}y"]
    tokenizer: Any = SimpleNamespace(decode=lambda ids, skip_special: "".join(words[each] for each in ids))
    stream = TextStream(tokenizer, skip_special=True, stop=[stop])
    text = ""
    for count in (1, 2, 3):
        text += stream.grow([*range(count)], ended=False)
        assert "one two.".startswith(text)
    assert text + stream.grow([0, 1, 2], ended=True, stop_string=stop) == "one two."


def test_what_is_held_back_comes_at_the_end() -> None:
    stream = TextStream(Bytes(), skip_special=True, stop=["abc"])
    assert stream.grow([*b"abcd"], ended=False) == "a"
    assert stream.grow([*b"abcde"], ended=False) == "b"
    assert stream.grow([*b"abcde"], ended=True) == "cde"


def test_what_is_no_character_comes_at_the_end() -> None:
    stream = TextStream(Bytes(), skip_special=True)
    tokens = [*b"ab", 0xE2, 0x82]
    assert stream.grow(tokens, ended=False) == ""
    assert stream.grow(tokens, ended=True) == "ab\ufffd"


def test_special_tokens_are_left_out_if_asked() -> None:
    assert TextStream(Bytes(), True).grow([*b"ab", 0], ended=True) == "ab"
    assert TextStream(Bytes(), False).grow([*b"ab", 0], ended=True) == "ab\0"


def test_without_a_tokenizer_there_is_no_text() -> None:
    assert TextStream(None, True).grow([1, 2], ended=True) == ""
    with pytest.raises(InvalidArgument, match="messages"):
        needs_text(None, "messages")
