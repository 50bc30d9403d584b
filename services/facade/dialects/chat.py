"""Bodies of `/v1/chat/completions`. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from pydantic import Field

from paceline.errors import Violation
from services.contracts.errors import InvalidArgument
from services.facade.chat_template import TemplateTraits, traits_of
from services.facade.dialects.asked import Limits
from services.facade.dialects.messages import conversation_of
from services.facade.dialects.parameters import checked_likeliest
from services.facade.dialects.vllm import SamplingBody, names_of
from services.facade.text import Tokenizer, needs_text

Json = dict[str, Any]

RESERVED = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents"),
        *("max_length", "messages", "padding", "return_assistant_tokens_mask", "return_dict"),
        *("return_tensors", "self", "tokenize", "tokenizer_kwargs", "tools", "truncation"),
    }
)
"""Names in `chat_template_kwargs` that mean something else than a variable of the template."""
_AS_LEFT_OUT = (None, "auto")
"""Values of a variable with which vLLM's server leaves it to the template."""


NAMES = {"prompt": "messages"}
"""Names of the parameters in a body, where they differ from the SDK's."""


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
    """Template in place of the model's. Refused unless the facade's `trust_request_chat_template` is set."""
    chat_template_kwargs: Json | None = None
    """Variables for the model's template, such as `enable_thinking`; those that it does not read have no effect."""

    def names_in_body(self) -> Mapping[str, str]:
        """Return the names of parameters in this body."""
        return names_of(self, NAMES)

    def prompts(self, tokenizer: Tokenizer | None, limits: Limits) -> list[list[int]]:
        """Return the token ids of the conversation."""
        return [chat_prompt(self, tokenizer, limits)]

    def drop_prompts(self) -> None:
        """Forget the conversation."""
        self.messages, self.chat_template, self.chat_template_kwargs = [], None, None

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


def chat_prompt(body: ChatBody, tokenizer: Tokenizer | None, limits: Limits | None = None) -> list[int]:
    """Return the token ids of a conversation. InvalidArgument: there is no tokenizer, or its template refuses."""
    if body.continue_final_message and body.add_generation_prompt:
        found = "is true, as it is when left out; must be false with continue_final_message"
        raise InvalidArgument([Violation("add_generation_prompt", found)])
    if body.chat_template is not None and not (limits and limits.trust_request_chat_template):
        found = "is not allowed: the facade does not run templates of requests; leave it out, or set"
        raise InvalidArgument([Violation("chat_template", f"{found} trust_request_chat_template there")])
    template = needs_text(tokenizer, "messages")
    traits = template.template() if body.chat_template is None else _traits(body.chat_template)
    options = _template_options(body.chat_template_kwargs or {}, traits.variables)
    options |= {
        "add_generation_prompt": body.add_generation_prompt,
        "continue_final_message": body.continue_final_message,
    }
    if body.chat_template is not None:
        options["chat_template"] = body.chat_template
    most = limits.max_model_len if limits is not None else None
    return template.chat(conversation_of(body.messages, traits), options, most)


def _traits(template: str) -> TemplateTraits:
    try:
        return traits_of(template)
    except ValueError as error:
        raise InvalidArgument([Violation("chat_template", str(error))]) from error


def _template_options(given: Json, variables: Set[str]) -> Json:
    """Return those that the template reads; others have no effect, as in vLLM. InvalidArgument for arguments."""
    found = [
        Violation(f"chat_template_kwargs.{name}", "is no variable of a template of this server; leave it out")
        for name in given
        if name in RESERVED
    ]
    if found:
        raise InvalidArgument(found)
    return {name: value for name, value in given.items() if name in variables and value not in _AS_LEFT_OUT}
