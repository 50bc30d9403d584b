"""Bodies of `/v1/chat/completions`. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from paceline.errors import Violation
from services.contracts.errors import InvalidArgument
from services.facade.dialects.parameters import checked_likeliest
from services.facade.dialects.vllm import SamplingBody
from services.facade.text import Tokenizer, needs_text

Json = dict[str, Any]


class ChatBody(SamplingBody):
    """Body of /v1/chat/completions."""

    messages: list[Json] = Field(min_length=1)
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """Newer name of `max_tokens`. Neither: what the model's length leaves."""
    logprobs: bool | None = None
    """Whether the answer has the log-probabilities of the sampled tokens."""
    top_logprobs: int | None = None
    """With `logprobs`: so many of the likeliest tokens of each position, at most 20."""
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    """Template in place of the model's."""
    chat_template_kwargs: Json | None = None

    def likeliest(self) -> int:
        """Return how many of the likeliest tokens of each position are asked for.

        InvalidArgument: they are asked for without `logprobs`.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgument([Violation("top_logprobs", "is set, which needs logprobs")])
        return checked_likeliest(self.top_logprobs or 0, "top_logprobs")

    def tells_logprobs(self) -> bool:
        """Return True if the answer has the log-probabilities of the sampled tokens."""
        return bool(self.logprobs)

    def most_tokens(self) -> int | None:
        """Return the most response tokens, under whichever name; None: what the model's length leaves."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def chat_prompt(body: ChatBody, tokenizer: Tokenizer | None) -> list[int]:
    """Return the token ids of a conversation. InvalidArgument: there is no tokenizer, or its template refuses."""
    options = {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
        **(body.chat_template_kwargs or {}),
    }
    return needs_text(tokenizer, "messages").chat(body.messages, options, body.chat_template)
