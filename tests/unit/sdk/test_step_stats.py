"""Figures of a step: they do not depend on the division of samples among rollouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import types as t
from paceline.batches.rollout import AsyncRollout, StepStats
from paceline.batches.run_rollouts import RunRollouts

STATUSES = [t.SampleStatus.COMPLETED, t.SampleStatus.TRUNCATED, t.SampleStatus.ABORTED, t.SampleStatus.FAILED]


def sample(
    length: int,
    *,
    steps: int = 0,
    drafted: int = 0,
    accepted: int = 0,
    status: t.SampleStatus = t.SampleStatus.COMPLETED,
    versions: tuple[int, ...] = (3,),
    seconds: float = 0.0,
) -> t.Sample:
    spans = tuple(t.VersionSpan(place, place + 1, version) for place, version in enumerate(versions))
    ran = (t.InstanceSpan("i0", 0, length, 100.0, 100.0 + seconds),) if steps else ()
    return t.Sample(
        prompt_id="p",
        slot=0,
        token_ids=np.arange(length),
        logprobs=np.zeros(length, dtype=np.float32),
        finish_reason=t.FinishReason.STOP,
        status=status,
        version_spans=spans,
        provenance=t.Provenance(
            drafted=drafted,
            accepted=accepted,
            decode_steps=steps,
            instance_spans=ran,
            queue_seconds=seconds / 2,
            generation_seconds=seconds,
        ),
        seed=0,
    )


def stats_of(samples: list[t.Sample]) -> StepStats:
    found = StepStats()
    for each in samples:
        found.add(each)
    return found


def test_the_figures_of_a_step() -> None:
    found = stats_of(
        [
            sample(10, steps=4, drafted=8, accepted=6, seconds=2.0),
            sample(30, steps=30, seconds=6.0, status=t.SampleStatus.TRUNCATED, versions=(3, 4)),
            sample(0, status=t.SampleStatus.FAILED, versions=()),
        ]
    ).figures()
    wanted = {
        "samples": 3,
        "tokens": 40,
        "response_length/mean": 40 / 3,
        "response_length/p50": 10,
        "response_length/p90": 26,
        "response_length/max": 30,
        "truncated_share": 1 / 3,
        "aborted_share": 0,
        "failed_share": 1 / 3,
        "mixed_versions_share": 1 / 3,
        "decode_steps": 34,
        "tokens_per_decode_step": 40 / 34,
        "drafted": 8,
        "accepted": 6,
        "drafted_per_token": 0.2,
        "accepted_token_share": 0.15,
        "accepted_share": 0.75,
        "reused_prefix": 0,
        "migrations": 0,
        "resubmissions": 0,
        "version_spans_per_sample": 1,
        "version_first": 3,
        "version_last": 4,
        "queue_seconds/mean": 2.0,
        "queue_seconds/max": 3.0,
        "generation_seconds/mean": 4.0,
        "generation_seconds/p50": 4.0,
        "generation_seconds/p90": 5.6,
        "generation_seconds/max": 6.0,
        "seconds": 6.0,
    }
    assert found == pytest.approx({f"rollout/{name}": value for name, value in wanted.items()})


def test_unknown_figures_are_left_out() -> None:
    assert StepStats().figures() == {"rollout/samples": 0, "rollout/tokens": 0}
    found = stats_of([sample(0, status=t.SampleStatus.FAILED, versions=())]).figures()
    assert {"rollout/accepted_share", "rollout/seconds", "rollout/version_last"}.isdisjoint(found)
    assert all(np.isfinite(value) for value in found.values())


@given(
    st.lists(
        st.lists(
            st.builds(
                sample,
                st.integers(0, 50),
                steps=st.integers(0, 50),
                drafted=st.integers(0, 9),
                status=st.sampled_from(STATUSES),
                seconds=st.floats(0, 100),
            )
        )
    )
)
def test_a_division_among_rollouts_changes_nothing(parts: list[list[t.Sample]]) -> None:
    whole = stats_of([each for part in parts for each in part]).figures()
    joined = StepStats.joined(stats_of(part) for part in parts).figures()
    assert joined == pytest.approx(whole)


async def begin(run: RunRollouts, step: int, samples: list[t.Sample]) -> None:
    """Begin a rollout that has read some samples."""

    async def begun() -> None:
        pass

    def rollout(_: object, batch: t.Batch) -> AsyncRollout:
        made: Any = SimpleNamespace(
            batch=batch, begin=begun, complete=True, post_ack=lambda: None, step_stats=stats_of(samples)
        )
        return cast(AsyncRollout, made)

    await run._begin(t.Batch("run", f"b{step}", step, 1, ()), rollout)


async def test_a_run_keeps_the_figures_of_its_last_steps() -> None:
    run = RunRollouts(cast(Any, None), "run", 0)
    await begin(run, 0, [sample(4)])
    await begin(run, 0, [sample(6)])
    assert run.stats(0)["rollout/tokens"] == 10
    for step in range(1, 9):
        await begin(run, step, [sample(step)])
    assert run.stats(8)["rollout/tokens"] == 8
    with pytest.raises(ValueError, match=r"step 0: .* it has figures of 1, 2"):
        run.stats(0)
