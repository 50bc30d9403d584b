"""Read the bodies of Paceline's own requests: hints of coming prompts, and rewards. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from pydantic import Field, PrivateAttr

from paceline import convert
from paceline import types as t
from paceline.errors import Violation
from paceline.v1 import rollout_pb2
from services.contracts.errors import InvalidArgument
from services.facade.dialects.body import (
    Body,
    Limits,
    TokenId,
    check_samples,
    check_sizes,
    check_unsupported,
    check_whole_numbers,
    checked_count,
    prompt_id_of,
    run_seed,
    token_ids_of,
)
from services.facade.dialects.vllm import SamplingFields, sampling_of
from services.facade.text import Tokenizer

NAMES = {"prompt": "prompts"}
"""Names of the parameters in a body, where they differ from the SDK's."""


class HintBody(SamplingFields):
    """Body of /paceline/v1/hint, with the sampling parameters of the coming requests."""

    of_model = True
    step: int = Field(ge=0, lt=1 << 63)
    """Step of the coming requests: the version that is published then, unless they have X-Paceline-Step."""
    policy_version: int | None = Field(default=None, ge=0, lt=1 << 63)
    """Version that will probably be published then; left out: `step`."""
    prompts: list[list[TokenId]] | list[str] = Field(min_length=1)
    """Token ids, or texts."""
    prompt_ids: list[str] | None = None
    """Names of the prompts, for requests with X-Paceline-Prompt; left out: hashes of their tokens."""
    max_tokens: int | None = None
    add_special_tokens: bool = True
    """True: text gets the special tokens that the model expects, such as a beginning token."""
    _announced: bytes = PrivateAttr(b"")

    @property
    def announced(self) -> bytes:
        """HintNextBatchRequest of the prepared body, without run and seed."""
        return self._announced

    def names_in_body(self) -> Mapping[str, str]:
        """Return the names of parameters in this body."""
        return NAMES

    def prepare(self, tokenizer: Tokenizer | None, limits: Limits | None) -> None:
        """Write the request to the gateway."""
        assert limits is not None, "it is about a model"
        check_unsupported(self, {})
        run_seed(self.seed)
        samples = checked_count(self.n)
        self.fill_in(limits.defaults)
        sampling = sampling_of(self, self.max_tokens, limits.logprobs_mode)
        prompts = hinted_prompts(self, tokenizer, limits)
        check_whole_numbers(prompts, sampling, NAMES, limits.vocab_size)
        check_samples(prompts, samples, limits.max_hinted_samples, NAMES)
        check_sizes(prompts, sampling, limits, NAMES)
        version = self.step if self.policy_version is None else self.policy_version
        groups = groups_of(self, prompts, samples)
        hint = t.BatchHint("", self.step, version, groups=groups, sampling=sampling)
        self._announced = convert.hint_to_proto(hint).SerializeToString()
        self.prompts, self.prompt_ids = [], None


class RewardBody(Body):
    """Reward of a sample, with the identity that its answer has in `paceline`."""

    prompt_id: str
    slot: int = Field(ge=0, lt=1 << 32)
    reward: float


class RewardsBody(Body):
    """Body of /paceline/v1/rewards."""

    step: int = Field(ge=0, lt=1 << 63)
    """Step of the samples, as in their answers."""
    rewards: list[RewardBody]
    _reported: bytes = PrivateAttr(b"")

    @property
    def reported(self) -> bytes:
        """ReportRewardsRequest of the prepared body, without the run."""
        return self._reported

    def prepare(self, tokenizer: Tokenizer | None, limits: Limits | None) -> None:
        """Write the request to the gateway."""
        check_unsupported(self, {})
        for number, each in enumerate(self.rewards):
            check_unsupported(each, {}, f"rewards[{number}].")
        given = [t.Reward(each.prompt_id, each.slot, each.reward) for each in self.rewards]
        request = rollout_pb2.ReportRewardsRequest(step=self.step, rewards=convert.rewards_to_proto(given))
        self._reported, self.rewards = request.SerializeToString(), []


def hinted_prompts(
    body: HintBody, tokenizer: Tokenizer | None, limits: Limits | None = None
) -> list[list[int]]:
    """Return the token ids of the prompts.

    InvalidArgument: texts have no tokenizer, or the number of names differs.
    """
    if body.prompt_ids is not None and len(body.prompt_ids) != len(body.prompts):
        found = f"has {len(body.prompt_ids)} names; there are {len(body.prompts)} prompts"
        raise InvalidArgument([Violation("prompt_ids", found)])
    return token_ids_of(
        body.prompts, "prompts", tokenizer, limits, special=body.add_special_tokens, hinted=True
    )


def groups_of(body: HintBody, prompts: Sequence[Sequence[int]], samples: int) -> list[t.Group]:
    """Return the coming groups: `samples` of each prompt, and twice as many for a prompt that is listed twice."""
    names = body.prompt_ids or [prompt_id_of(prompt) for prompt in prompts]
    counts = Counter(names)
    first = dict(zip(reversed(names), reversed(prompts), strict=True))
    return [t.Group(name, first[name], samples * count) for name, count in counts.items()]
