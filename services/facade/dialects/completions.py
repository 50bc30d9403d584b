"""Bodies of `/v1/completions`. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from paceline.errors import Violation
from services.contracts.errors import InvalidArgument
from services.facade.dialects.asked import Limits, token_ids_of
from services.facade.dialects.parameters import TokenId, checked_likeliest
from services.facade.dialects.vllm import SamplingBody, names_of
from services.facade.text import Tokenizer

NAMES = {"top_logprobs": "logprobs"}
"""Names of the parameters in a body, where they differ from the SDK's."""


class CompletionBody(SamplingBody):
    """Body of /v1/completions."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    """Text or token ids, of one prompt or of several."""
    max_tokens: int = 16
    logprobs: int | None = None
    """Log-probabilities of the sampled tokens, and of so many of the likeliest of each position; at most 20."""
    add_special_tokens: bool = True
    """Whether text gets the special tokens that the model expects, such as one of its beginning."""

    def names_in_body(self) -> Mapping[str, str]:
        """Return the names of parameters in this body."""
        return names_of(self, NAMES)

    def prompts(self, tokenizer: Tokenizer | None, limits: Limits) -> list[list[int]]:
        """Return the token ids of the prompts."""
        return completion_prompts(self, tokenizer, limits)

    def drop_prompts(self) -> None:
        """Forget the prompts."""
        self.prompt = ""

    def most_tokens(self) -> int | None:
        """Return the most response tokens."""
        return self.max_tokens

    def likeliest(self) -> int:
        """Return how many of the likeliest tokens of each position are asked for."""
        return checked_likeliest(self.logprobs or 0, "logprobs")

    def tells_logprobs(self) -> bool:
        """Return True if the answer has the log-probabilities of the sampled tokens."""
        return self.logprobs is not None


def completion_prompts(
    body: CompletionBody, tokenizer: Tokenizer | None, limits: Limits | None = None
) -> list[list[int]]:
    """Return the token ids of a body's prompts. InvalidArgument: there is none, or text and no tokenizer."""
    given = body.prompt
    several = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not several:
        raise InvalidArgument([Violation("prompt", "is empty")])
    return token_ids_of(several, "prompt", tokenizer, limits, special=body.add_special_tokens)
