"""A trainer that announces nothing, over HTTP: its steps are announced from the second epoch on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.facade.dialects.body import prompt_id_of
from services.gateway.api.hints import Hint
from tests.integration.facade.conftest import Stack, StackMaker
from tests.integration.gateway.conftest import until

EPOCH = [[[first], [first + 1], [first + 2]] for first in (1, 4, 7)]
GROUP = 2
# The first step that comes again forms the first forecast, and the next one shows that it is true.
FIRST = len(EPOCH) + 2
BODY: dict[str, Any] = {"max_tokens": 4, "n": GROUP, "return_token_ids": True}


def hints(stack: Stack, run: str = "http") -> dict[int, Hint]:
    runs = stack.gateway.gateway.leadership.leading().hinting.book.runs
    return dict(runs[run].hints) if run in runs else {}


async def ask(stack: Stack, prompts: list[list[int]], **headers: str) -> None:
    """Ask for a step as trainers do: a request for each prompt, all at once."""
    answers = await asyncio.gather(
        *(
            stack.facade.http.post("/v1/completions", json={**BODY, "prompt": prompt}, headers=headers)
            for prompt in prompts
        )
    )
    assert [answer.status_code for answer in answers] == [200] * len(prompts)


def outcome(stack: Stack, name: str) -> float:
    return stack.facade.metric("forecasts_total", outcome=name)


async def test_samples_that_are_forecast_are_those_that_are_asked_for(
    stack_of: StackMaker, tmp_path: Path
) -> None:
    stack = await stack_of(instances=2)
    announced: dict[int, list[tuple[str, int, int]]] = {}
    last = 3 * len(EPOCH)
    for step in range(last):
        await ask(stack, EPOCH[step % len(EPOCH)])
        if step + 1 >= FIRST:
            await until(lambda step=step: step + 1 in hints(stack), "the next step is announced")
        announced |= {
            number: [
                (g.prompt_id, slot, seed) for g in hint.message.groups for slot, seed in enumerate(g.seeds)
            ]
            for number, hint in hints(stack).items()
        }
        await stack.facade.post("/update_weights", weight_dir=str(tmp_path))
    came = [item for fake in stack.fakes for item in fake.accepted]
    assert list(announced) == list(range(FIRST, last + 1))
    for step in range(FIRST, last):
        # A hint is of use only where it names the very samples that are asked for then.
        samples = sorted((item.prompt_id, item.slot, item.seed) for item in came if item.step == step)
        assert sorted(announced[step]) == samples
        assert len(samples) == GROUP * len(EPOCH[0])
    assert outcome(stack, "announced") == len(announced)
    assert outcome(stack, "missed") == outcome(stack, "failed") == 0
    # The gateway names the steps that nobody announced.
    assert stack.gateway.metric("unannounced_steps_total") == FIRST
    # New weights end a step of single samples.
    assert stack.gateway.metric("step_seconds_count") == last


async def test_a_step_of_other_prompts_is_a_miss_and_costs_nothing_else(stack_of: StackMaker) -> None:
    stack = await stack_of()
    for step in range(FIRST):
        await ask(stack, EPOCH[step % len(EPOCH)], **{"X-Paceline-Step": str(step)})
    await until(lambda: FIRST in hints(stack), "the next step is announced")
    await ask(stack, [[40], [41]], **{"X-Paceline-Step": str(FIRST)})
    assert not hints(stack), "its step has begun"
    await ask(stack, EPOCH[0], **{"X-Paceline-Step": str(FIRST + 1)})
    assert outcome(stack, "missed") == outcome(stack, "announced") == 1


@pytest.mark.parametrize("settings", [{"alone": False}, {"forecast_prompts": 0}, {"forecast_prompts": 5}])
async def test_nothing_is_forecast_where_it_cannot_be_or_is_not_wanted(
    stack_of: StackMaker, settings: dict[str, Any]
) -> None:
    stack = await stack_of(**settings)
    for step in range(2 * len(EPOCH)):
        await ask(stack, EPOCH[step % len(EPOCH)], **{"X-Paceline-Step": str(step)})
    assert outcome(stack, "announced") == 0
    assert not hints(stack)


async def test_a_hint_of_the_trainer_is_not_replaced(stack_of: StackMaker) -> None:
    stack = await stack_of()
    for step in range(2 * len(EPOCH)):
        own = {"step": step + 1, "prompts": [[50]], "n": 1, "max_tokens": 4}
        await stack.facade.post("/paceline/v1/hint", **own)
        await ask(stack, EPOCH[step % len(EPOCH)], **{"X-Paceline-Step": str(step)})
    assert outcome(stack, "announced") == 0
    (hint,) = hints(stack).values()
    assert [group.prompt_id for group in hint.message.groups] == [prompt_id_of([50])]


async def test_a_gateway_that_takes_no_hint_holds_nothing_up(
    stack_of: StackMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The gateway refuses more groups than it takes.
    stack = await stack_of()
    leading = stack.gateway.gateway.leadership.leading()

    async def refused(request: object) -> int:
        raise RuntimeError("no")

    monkeypatch.setattr(leading.hinting, "hint", refused)
    for step in range(FIRST + 1):
        await ask(stack, EPOCH[step % len(EPOCH)], **{"X-Paceline-Step": str(step)})
    await until(lambda: outcome(stack, "failed"), "the hint has failed")
    assert outcome(stack, "announced") == 0
