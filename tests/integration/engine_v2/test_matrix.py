"""The whole matrix: four models, four samplings, three engines, five ways, and moves between all engines.

Plain decoding on V1 is the reference. On V1, on V2 and on V2 scheduling ahead tokens are the same when decoded
plainly, with drafts, from a prefix, behind preemptions, and behind a move from each engine to each other one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineOptions, EngineRequest
from tests.integration.exactness.conftest import requests_of
from tests.integration.migration import test_engine as moves
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.draft_policies import Drafts
from tests.support.engine_actor import EngineActor
from tests.support.engine_host import Outcome, Scenario, run_scenario
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.soak import Progress, record

pytestmark = [pytest.mark.soak, pytest.mark.timeout(3000)]

TOKENS, FEW = 48, 3
SAMPLINGS: dict[str, dict[str, Any]] = {
    "T=1": {},
    "top-k, top-p": {"temperature": 0.7, "top_k": 100, "top_p": 0.9},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.7, "frequency_penalty": 0.3},
    "min-p": {"temperature": 0.9, "min_p": 0.03},
}
ENGINES: dict[str, dict[str, Any]] = {
    "V1": {},
    "V2": {"engine": "v2"},
    "V2 ahead": {"engine": "v2", "schedule_ahead": True},
}
ARCHITECTURES = ("qwen3", "llama", "gemma3_text", "qwen3_moe")
# Of KV, which is not sent: a sample is computed again where it goes.
SEVERAL_KINDS = ("gemma3_text",)
# Bytes of a block: 3 layers, 32 positions, 2 heads of 32 numbers, keys and values.
_BLOCK_BYTES = 3 * 32 * 2 * 32 * 2 * 4


@dataclass(slots=True)
class Tally:
    """Tokens that were compared with the reference, by engine and way, and those that differ."""

    compared: dict[str, int] = field(default_factory=dict)
    differing: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    accepted: int = 0

    def compare(self, case: str, found: list[int], expected: list[int]) -> None:
        """Compare the tokens of a sample."""
        differ = sum(a != b for a, b in zip(found, expected, strict=False)) + abs(len(found) - len(expected))
        self.compared[case] = self.compared.get(case, 0) + len(expected)
        if differ:
            self.differing[case] = self.differing.get(case, 0) + differ


def settled(engine: Any, count: int) -> list[int]:
    """Tokens of the only sample of an engine in so many steps; 0: to its end. Nothing is in flight afterwards."""
    found = [token for tokens, _ in moves.steps(engine, count).values() for token in tokens]
    return found + [token for step in engine.settle() for token in step.token_ids]


@dataclass(slots=True)
class Matrix:
    """Engines of one model by name, their addresses for KV, if it can be sent, and the tally."""

    engines: dict[str, EngineActor]
    addresses: dict[str, str]
    tally: Tally = field(default_factory=Tally)

    def scenario(self, name: str, scenario: Scenario) -> Outcome:
        """Run a scenario in an engine."""
        found: Outcome = self.engines[name].call(run_scenario, scenario)
        self.tally.preemptions += found.preemptions
        self.tally.accepted += found.accepted
        return found

    def ways(self, name: str, asked: tuple[EngineRequest, ...], truth: dict[str, list[int]]) -> None:
        """Decode plainly, with drafts, from prefixes, and all samples in a cache that is too small for them."""
        few, drafts = asked[:FEW], Drafts("varying", truth=truth)
        resumed = tuple(
            replace(each, prefix=tuple(truth[each.sample_id][: 1 + 7 * i])) for i, each in enumerate(few)
        )
        plain = Scenario(few)
        ways = {
            "plain": plain,
            "speculation": Scenario(few, drafts),
            "adversarial drafts": Scenario(few, Drafts("adversarial", truth=truth)),
            "resumed": Scenario(resumed, drafts),
            "preempted": Scenario(asked, drafts),
        }
        for way, scenario in ways.items():
            found = self.scenario(name, scenario)
            for each in scenario.requests:
                tokens = [*each.prefix, *found.tokens[each.sample_id]]
                self.tally.compare(f"{name}: {way}", tokens, truth[each.sample_id])

    def move(self, donor: str, receiver: str, fields: dict[str, Any], name: str) -> None:
        """Let a sample leave one engine for another in the middle, with its KV if KV of this model can be sent."""
        fields = {"max_tokens": TOKENS} | fields
        self.engines["V1"].call(moves.add, moves.request(f"{name}-stayed", **fields))
        stayed = self.engines["V1"].call(settled, 0)
        first, second = self.engines[donor], self.engines[receiver]
        second.call(moves.withdrawn_by_reset)
        first.call(moves.add, moves.request(name, **fields))
        tokens = first.call(settled, 12)
        if self.addresses:
            way = (first, second, self.addresses[receiver])
            exported, _ = moves.stage_one(way, name, tokens, **fields)
            tokens += (more := first.call(settled, 4))
            moves.stage_two(way, name, exported, more)
        else:
            first.call(moves.end, name)
            second.call(moves.add, moves.request(f"{name}'", tokens, **fields))
        rest = second.call(settled, 0)
        self.tally.compare(f"{donor} to {receiver}: moved", [*tokens, *rest], stayed)
        first.call(settled, 0)


@pytest.fixture(params=ARCHITECTURES)
def matrix(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Matrix]:
    """Three engines of a model, with room for some of the samples only."""
    byte_tokenizer(tmp_path / "model", VOCAB_SIZE)
    model = tiny_model(tmp_path / "model", request.param)
    options = EngineOptions(
        model=str(model),
        dtype="float32",
        max_num_seqs=8,
        max_model_len=256,
        block_size=moves.BLOCK,
        kv_cache_memory_bytes=20 * _BLOCK_BYTES,
    )
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(EngineActor(replace(options, **fields), place % 2))
            for place, (name, fields) in enumerate(ENGINES.items())
        }
        sent = request.param not in SEVERAL_KINDS
        addresses = {name: engine.call(moves.listen) for name, engine in engines.items()} if sent else {}
        yield Matrix(engines, addresses)


def test_no_token_differs(matrix: Matrix, request: pytest.FixtureRequest) -> None:
    architecture = request.node.callspec.params["matrix"]
    progress, moved = Progress(architecture, len(SAMPLINGS), "samplings"), 0
    for done, (kind, fields) in enumerate(SAMPLINGS.items()):
        progress.tell(done, kind)
        asked = requests_of(
            VOCAB_SIZE, Sampling(max_tokens=TOKENS, **fields), count=9, lengths=(20, 90), seed=3
        )
        truth: dict[str, list[int]] = {}
        # One after the other, so that none is preempted.
        for each in asked:
            truth |= matrix.scenario("V1", Scenario((each,))).tokens
        for name in ENGINES:
            matrix.ways(name, asked, truth)
        for donor, receiver in permutations(ENGINES, 2):
            matrix.move(donor, receiver, fields, f"m{moved}")
            moved += 1
    tally = matrix.tally
    figures = {
        "tokens": sum(tally.compared.values()),
        "differing": sum(tally.differing.values()),
        "preemptions": tally.preemptions,
        "accepted": tally.accepted,
        "moves": moved,
        "by_case": tally.compared,
    }
    record(f"engine_matrix_{architecture}", figures)
    assert not tally.differing
    assert tally.preemptions > 0
    assert tally.accepted > 0
