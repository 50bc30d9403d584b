"""A V2 engine under a random schedule: its tokens are V1's, and nothing is left behind.

Samples arrive, take over cached rollouts, are aborted, paused and resumed; drafts are right, wrong, late, long or
absent; weights are loaded anew while samples run; the cache is too small for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineOptions, EngineRequest, Verifier
from services.generation.kv_transfer.reason import NotMoved
from tests.integration.exactness.conftest import requests_of
from tests.support.engine_host import EngineHost, Outcome, Scenario
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.remote_engine import RemoteEngine
from tests.support.soak import record
from tests.support.v2_slots import known_samples

SAMPLINGS = (
    Sampling(max_tokens=24),
    Sampling(max_tokens=30, temperature=0.6, top_p=0.9),
    Sampling(max_tokens=24, presence_penalty=0.7, frequency_penalty=0.2),
    Sampling(max_tokens=40, min_p=0.05),
)
_BLOCK_BYTES = 3 * 32 * 2 * 32 * 2 * 4


class _Schedule:
    """The schedule, where the engine is."""

    def __init__(
        self, engine: Any, seed: int, requests: Sequence[EngineRequest], truth: Mapping[str, Any]
    ) -> None:
        self.engine, self.random, self.truth, self.seed = engine, Random(seed), truth, seed
        self.waiting = [replace(each, sample_id=f"{seed}/{each.sample_id}") for each in requests]
        self.tokens: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.paused: set[str] = set()
        self.done = dict.fromkeys(("arrived", "aborted", "paused", "reloaded", "drafted", "accepted"), 0)

    def run(self, steps: int, folder: str) -> dict[str, int]:
        """Take so many steps, then end all samples."""
        for _ in range(steps):
            self.act(folder)
            self.step()
        self.record(self.engine.settle())
        for sample_id in list(self.paused):
            self.engine.migration.resume(sample_id)
        self.engine.abort([each for each in self.tokens if each not in self.ended])
        while self.engine.has_work:
            self.engine.step()
        space = self.engine.migration.space
        assert space.free_blocks == space.total_blocks, "blocks are left behind"
        assert known_samples(self.engine) == (0, 0)
        self.engine.forget_kv()
        return self.done

    def act(self, folder: str) -> None:
        """Do something between two steps, as the loop of an instance would."""
        chance = self.random.random
        while self.waiting and chance() < 0.3:
            request = self.waiting.pop(0)
            self.tokens[request.sample_id] = []
            self.engine.add(request)
            self.done["arrived"] += 1
        if chance() < 0.25:
            self.record(self.engine.settle())
            self.between(folder)

    def between(self, folder: str) -> None:
        """Do what needs an engine with nothing in flight."""
        from safetensors.torch import load_file

        running = [each for each in self.tokens if each not in self.ended | self.paused]
        choice = self.random.randrange(4)
        if choice == 0 and running:
            sample_id = self.random.choice(running)
            self.engine.abort([sample_id])
            self.ended.add(sample_id)
            self.done["aborted"] += 1
        elif choice == 1 and running:
            self.pause(self.random.choice(running))
        elif choice == 2 and not self.paused:
            weights = load_file(Path(folder) / "model.safetensors")
            self.engine.apply_weights(weights.items(), preempt=True)
            self.done["reloaded"] += 1
        elif self.paused:
            sample_id = self.paused.pop()
            self.engine.migration.resume(sample_id)

    def pause(self, sample_id: str) -> None:
        migration = self.engine.migration
        try:
            migration.pause(migration.export(sample_id))
        except NotMoved:
            return
        self.paused.add(sample_id)
        self.done["paused"] += 1

    def step(self) -> None:
        drafts = {}
        for state in self.engine.decoding():
            whole = self.truth[state.sample_id.partition("/")[2]]
            # Late by one, now and then.
            begin = len(state.response) + (self.random.random() < 0.1)
            guess = list(whole[begin : begin + self.random.randrange(9)])[: state.room]
            guess = [token if self.random.random() < 0.9 else (token + 7) % VOCAB_SIZE for token in guess]
            if guess and self.random.random() < 0.8:
                drafts[state.sample_id] = guess
        self.engine.put_drafts(drafts)
        self.record(self.engine.step())

    def record(self, steps: Sequence[Any]) -> None:
        for step in steps:
            sample_id = step.sample_id
            assert sample_id not in self.ended, "a sample goes on after its end"
            self.done["drafted"] += step.drafted
            self.done["accepted"] += step.accepted
            own, whole = self.tokens[sample_id], self.truth[sample_id.partition("/")[2]]
            own += step.token_ids
            assert own == list(whole[: len(own)]), (self.seed, sample_id)
            if step.finish is not None:
                assert len(own) == len(whole)
                self.ended.add(sample_id)


def schedule(
    engine: Any,
    seed: int,
    requests: Sequence[EngineRequest],
    truth: Mapping[str, Any],
    steps: int,
    folder: str,
) -> dict[str, int]:
    schedule = _Schedule(engine, seed, requests, truth)
    try:
        return schedule.run(steps, folder)
    finally:
        engine.abort(schedule.tokens)
        engine.settle()


def _requests(count: int) -> tuple[EngineRequest, ...]:
    made = requests_of(VOCAB_SIZE, SAMPLINGS[0], count=count, lengths=(5, 60), seed=11)
    return tuple(replace(each, sampling=SAMPLINGS[i % 4]) for i, each in enumerate(made))


def _following(requests: Sequence[EngineRequest], then: Outcome) -> tuple[EngineRequest, ...]:
    """Let every third sample take over what other noise gave, for as long as that is about as probable."""
    random = Random(2)
    return tuple(
        each
        if i % 3
        else replace(
            each,
            verifier=Verifier.LENIENT,
            cached=tuple(then.tokens[each.sample_id]),
            cached_logprobs=tuple(value + random.gauss(0, 0.2) for value in then.logprobs[each.sample_id]),
        )
        for i, each in enumerate(requests)
    )


class _Bench:
    """V1's tokens, and an engine on V2 that schedules ahead."""

    def __init__(self, folder: Path, count: int) -> None:
        self.model = str(tiny_model(folder / "model"))
        options = EngineOptions(
            model=self.model,
            dtype="float32",
            max_num_seqs=4,
            max_model_len=128,
            max_num_batched_tokens=64,
            block_size=32,
            kv_cache_memory_bytes=256 * _BLOCK_BYTES,
        )
        asked = _requests(count)
        with EngineHost(replace(options, max_num_seqs=64, max_num_batched_tokens=512)) as v1:
            then = v1.run(Scenario(tuple(replace(each, seed=each.seed ^ 1) for each in asked)))
            self.requests = _following(asked, then)
            found = v1.run(Scenario(self.requests))
        assert 0 < sum(found.reused.values()) < sum(len(each.cached) for each in self.requests)
        self.truth = found.tokens
        small = 10 * _BLOCK_BYTES
        self.options = replace(options, engine="v2", schedule_ahead=True, kv_cache_memory_bytes=small)


@pytest.mark.timeout(400)
def test_a_random_schedule_changes_no_token(tmp_path: Path) -> None:
    bench = _Bench(tmp_path, 24)
    with RemoteEngine(bench.options) as engine:
        # The engine lives on, so an example that fails is not made smaller.
        @settings(max_examples=2, deadline=None, phases=[Phase.generate])
        @given(seed=st.integers(0, 1 << 30))
        def check(seed: int) -> None:
            done = engine.run(schedule, seed, bench.requests, bench.truth, 60, bench.model)
            assert done["arrived"] > 8
            assert done["accepted"] > 20

        check()


@pytest.mark.soak
@pytest.mark.timeout(3000)
def test_a_long_random_schedule_changes_no_token(tmp_path: Path) -> None:
    bench = _Bench(tmp_path, 160)
    total: dict[str, int] = {}
    with RemoteEngine(bench.options) as engine:
        for seed in range(10):
            done = engine.run(schedule, seed, bench.requests[16 * seed :], bench.truth, 100, bench.model)
            total = {key: total.get(key, 0) + value for key, value in done.items()}
    assert min(total.values()) > 0
    record("engine_v2", total)
