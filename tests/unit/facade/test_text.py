"""Text of samples that grow."""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from services.contracts.errors import InvalidArgument
from services.facade.text import TextStream, needs_text


class Bytes:
    """A tokenizer whose tokens are bytes, and 0 is special."""

    def encode(self, text: str, special: bool) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special: bool) -> str:
        return bytes(token for token in token_ids if token or not skip_special).decode(errors="replace")

    def token(self, token_id: int) -> str:
        return self.decode([token_id], False)

    def chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any], template: str | None
    ) -> list[int]:
        raise AssertionError("not used")


def test_a_character_of_several_tokens_comes_when_it_is_whole() -> None:
    tokens = list("aé€😀b".encode())
    stream = TextStream(Bytes(), skip_special=True)
    pieces = [stream.grow(tokens[: n + 1], ended=n + 1 == len(tokens)) for n in range(len(tokens))]
    assert "".join(pieces) == "aé€😀b"
    assert pieces[:3] == ["a", "", "é"]
    assert not any("\ufffd" in piece for piece in pieces)


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
