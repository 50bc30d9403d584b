"""One family of models decoded in every way that its engine allows, against plain decoding.

with model_engine("gpt-oss", folder) as actor:
    row = matrix_row("gpt-oss", actor)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineOptions, EngineRequest
from tests.support.architectures import FAMILIES, VOCAB_SIZE
from tests.support.draft_checks import listed
from tests.support.draft_policies import PLANNED, Drafts
from tests.support.engine_actor import EngineActor
from tests.support.engine_host import Outcome, Scenario, run_scenario
from tests.support.oracle import Oracle
from tests.support.self_moves import moved, refused_moves

SAMPLES, TOKENS = 8, 48
Tokens = Mapping[str, Sequence[int]]


@dataclass(slots=True)
class Row:
    """Tokens of a family by mode: those that were compared, and those that differ from plain decoding."""

    family: str
    dtype: str
    refused: dict[str, str]
    compared: dict[str, int] = field(default_factory=dict)
    differ: dict[str, int] = field(default_factory=dict)
    drafted: int = 0
    accepted: int = 0
    refused_by_check: dict[str, str] = field(default_factory=dict)
    off_transformers: float = 0.0
    """Largest difference of a log-probability from transformers in float32, in nats."""

    def add(self, mode: str, plain: Tokens, found: Tokens) -> None:
        """Compare the samples of a mode with plain decoding."""
        self.compared[mode] = sum(map(len, plain.values()))
        self.differ[mode] = sum(
            abs(len(tokens) - len(found[name]))
            + sum(a != b for a, b in zip(tokens, found[name], strict=False))
            for name, tokens in plain.items()
        )

    def figures(self) -> dict[str, Any]:
        """Return the row for a file."""
        return asdict(self)


def options_of(family: str, folder: Path, **changes: Any) -> EngineOptions:
    """Return the options of an engine of a model: blocks of 32, prompts in chunks of 96."""
    own: dict[str, Any] = {
        "dtype": FAMILIES[family].dtype,
        "max_num_seqs": 16,
        "max_model_len": 256,
        "kv_cache_memory_bytes": 48 << 20,
        "block_size": 32,
        "max_num_batched_tokens": 96,
    }
    return EngineOptions(str(folder), **own | changes)


def requests_of(count: int = SAMPLES, seed: int = 5) -> tuple[EngineRequest, ...]:
    """Return samples whose prompts are shorter and longer than a block, two of them the same one."""
    random = Random(seed)
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True)
    made = []
    for i in range(count):
        prompt = tuple(random.randrange(2, VOCAB_SIZE) for _ in range(random.randrange(5, 90)))
        made.append(EngineRequest(f"r{i}", prompt, (), sampling, random.getrandbits(64)))
    return (*made[:-1], replace(made[-1], prompt=made[0].prompt))


def plain_of(actor: EngineActor, requests: tuple[EngineRequest, ...]) -> Outcome:
    """Decode plainly."""
    return actor.call(run_scenario, Scenario(requests))


def resumed_of(actor: EngineActor, requests: tuple[EngineRequest, ...], plain: Outcome, cold: bool) -> Tokens:
    """Resume each sample from some of its tokens, without KV of them or with what the prefix cache has."""
    half = tuple(
        replace(each, prefix=tuple(plain.tokens[each.sample_id][: 15 + 2 * i]))
        for i, each in enumerate(requests)
    )
    found = actor.call(run_scenario, Scenario(half, cold=cold)).tokens
    return {each.sample_id: [*each.prefix, *found[each.sample_id]] for each in half}


def off_transformers(folder: Path, requests: Sequence[EngineRequest], plain: Outcome) -> float:
    """Return by how many nats plain decoding differs from transformers at most."""
    oracle = Oracle(folder)
    return max(
        abs(one - other)
        for each in requests
        for one, other in zip(
            oracle.judge(each, plain.tokens[each.sample_id]).raw, plain.logprobs[each.sample_id], strict=True
        )
    )


def matrix_row(family: str, actor: EngineActor, tell: Callable[[str], None] = lambda mode: None) -> Row:
    """Decode a family in every way."""
    row = Row(family, FAMILIES[family].dtype, actor.call(listed))
    requests = requests_of()
    plain = plain_of(actor, requests)
    row.add("repeated", plain.tokens, plain_of(actor, requests).tokens)
    row.add("prefix cache", plain.tokens, actor.call(run_scenario, Scenario(requests, cold=False)).tokens)
    for policy in ("adversarial", "varying", PLANNED):
        tell(policy)
        drafts = Drafts(policy, truth=plain.tokens, seed=1)
        found = actor.call(run_scenario, Scenario(requests, drafts))
        row.add(policy, plain.tokens, found.tokens)
        row.drafted += found.drafted
        row.accepted += found.accepted
    if "resuming" not in row.refused:
        tell("resumed")
        row.add("resumed", plain.tokens, resumed_of(actor, requests, plain, cold=True))
        row.add("resumed, cached", plain.tokens, resumed_of(actor, requests, plain, cold=False))
    if not (reason := actor.call(refused_moves)):
        row.add("moved", plain.tokens, actor.call(moved, requests, 20))
        row.add("after moves", plain.tokens, actor.call(run_scenario, Scenario(requests, cold=False)).tokens)
    else:
        assert row.refused["moves"] == reason
    return row
