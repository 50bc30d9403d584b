"""Routes of Paceline's own: hints of coming prompts, and rewards."""

from __future__ import annotations

from fastapi import APIRouter, Request

from paceline import types as t
from paceline.errors import Violation
from services.contracts.errors import InvalidArgument
from services.facade.dialects import paceline, vllm
from services.facade.dialects.parameters import (
    check_samples,
    check_unsupported,
    check_whole_numbers,
    checked_count,
    run_seed,
)
from services.facade.routes.checked import checked_router
from services.facade.serving import Facade


def paceline_routes(facade: Facade) -> APIRouter:
    """Return the routes."""
    router = checked_router("Paceline", "/paceline/v1")

    @router.post("/hint")
    async def hint(body: paceline.HintBody, request: Request) -> dict[str, int]:
        """Announce the prompts of a coming step, for idle instances; 0 samples if nothing can be made of it."""
        check_unsupported(body, {})
        request.state.names = paceline.NAMES
        prompts = paceline.hinted_prompts(body, facade.tokenizer)
        samples = checked_count(body.n)
        sampling = vllm.sampling_of(body, body.max_tokens, facade.config.logprobs_mode)
        model = await facade.fleet.model()
        check_whole_numbers(prompts, sampling, paceline.NAMES, model.vocab_size)
        check_samples(prompts, samples, facade.config.max_hinted_samples, paceline.NAMES)
        announced = t.BatchHint(
            run_id=facade.run_id(request),
            step=body.step,
            policy_version=body.step if body.policy_version is None else body.policy_version,
            groups=paceline.groups_of(body, prompts, samples),
            sampling=sampling,
            run_seed=_hinted_seed(facade, body.seed),
        )
        return {"samples": await facade.client().hint(announced)}

    @router.post("/rewards")
    async def rewards(body: paceline.RewardsBody, request: Request) -> dict[str, int]:
        """Report rewards of finished samples, for the drafter; `matched` of them are known."""
        check_unsupported(body, {})
        for number, each in enumerate(body.rewards):
            check_unsupported(each, {}, f"rewards[{number}].")
        given = [t.Reward(each.prompt_id, each.slot, each.reward) for each in body.rewards]
        matched = await facade.client().report_single_rewards(facade.run_id(request), body.step, given)
        return {"matched": matched}

    return router


def _hinted_seed(facade: Facade, seed: int | None) -> int:
    """Return the seed of the requests to come: without one, they have that of the facade that they come to."""
    given = run_seed(seed)
    if given is None and not facade.config.alone:
        found = "is needed where there are several facades, and so in the requests to come"
        raise InvalidArgument([Violation("seed", found)])
    return facade.names.seed if given is None else given
