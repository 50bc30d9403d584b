"""Bodies of what neither dialect has: hints of coming prompts, and rewards. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pydantic import Field

from paceline import types as t
from paceline.errors import Violation
from services.contracts.errors import InvalidArgument
from services.facade.dialects.parameters import Body, TokenId, prompt_id_of
from services.facade.dialects.vllm import SamplingFields
from services.facade.text import Tokenizer, needs_text

NAMES = {"prompt": "prompts"}
"""Names of the parameters in a body, where they differ from the SDK's."""


class HintBody(SamplingFields):
    """Body of /paceline/v1/hint. Sampling parameters are those of the requests to come."""

    step: int = Field(ge=0, lt=1 << 63)
    """Step of the requests to come: the version that is published then, unless they have X-Paceline-Step."""
    policy_version: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Version that they are expected to meet; left out: `step`."""
    prompts: list[list[TokenId]] | list[str] = Field(min_length=1)
    """Token ids, or texts."""
    prompt_ids: list[str] | None = None
    """Names of the prompts, for requests with X-Paceline-Prompt; left out: hashes of their tokens."""
    max_tokens: int | None = None
    add_special_tokens: bool = True
    """Whether text gets the special tokens that the model expects, such as one of its beginning."""


class RewardBody(Body):
    """Reward of a sample, under the names that its answer has in `paceline`."""

    prompt_id: str
    slot: int = Field(ge=0, lt=1 << 32)
    reward: float


class RewardsBody(Body):
    """Body of /paceline/v1/rewards."""

    step: int = Field(ge=0, lt=1 << 63)
    """Step of the samples, as in their answers."""
    rewards: list[RewardBody]


def hinted_prompts(body: HintBody, tokenizer: Tokenizer | None) -> list[list[int]]:
    """Return the token ids of the prompts.

    InvalidArgument: there is no tokenizer for texts, or not a name for each.
    """
    if body.prompt_ids is not None and len(body.prompt_ids) != len(body.prompts):
        found = f"has {len(body.prompt_ids)} names; there are {len(body.prompts)} prompts"
        raise InvalidArgument([Violation("prompt_ids", found)])
    return [
        needs_text(tokenizer, "prompts").encode(each, body.add_special_tokens)
        if isinstance(each, str)
        else list(each)
        for each in body.prompts
    ]


def groups_of(body: HintBody, prompts: Sequence[Sequence[int]], samples: int) -> list[t.Group]:
    """Return the groups to come: `samples` of each prompt, one that comes twice has twice as many."""
    names = body.prompt_ids or [prompt_id_of(prompt) for prompt in prompts]
    counts = Counter(names)
    first = dict(zip(reversed(names), reversed(prompts), strict=True))
    return [t.Group(name, first[name], samples * count) for name, count in counts.items()]
