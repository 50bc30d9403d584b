"""A sample that moves to another engine: what the head reads of it travels with its KV."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from services.contracts.sampling import Sampling
from services.generation.engine.types import Eagle3Options, EngineRequest
from services.generation.kv_transfer.transfers import KvPart
from tests.integration.eagle3.conftest import BLOCK_BYTES, DEPTH, OPTIONS, Bench
from tests.support import eagle3_runs
from tests.support.quantized_runs import Rolled
from tests.support.remote_engine import RemoteEngine

pytestmark = pytest.mark.timeout(400)

BLOCK = 32
PROMPT = tuple(range(2, 72))


@pytest.fixture(scope="module")
def receiver(bench: Bench) -> Iterator[tuple[RemoteEngine, str]]:
    """Engine with the same policy and head but no quantized copy; the address of its port. The donor's is open."""
    head = next(bench.folder.glob("drafter-000001"))
    options = replace(
        OPTIONS,
        model=str(bench.model),
        kv_cache_memory_bytes=40 * BLOCK_BYTES,
        eagle3=Eagle3Options(str(head), DEPTH),
    )
    with RemoteEngine(options) as engine:
        bench.engine.run(eagle3_runs.listen)
        yield engine, engine.run(eagle3_runs.listen)


@pytest.mark.parametrize("depth", [DEPTH, 0])
def test_a_sample_that_moves_is_drafted_for_from_its_second_step_on(
    bench: Bench, receiver: tuple[RemoteEngine, str], depth: int
) -> None:
    """Whether the donor drafted for it or not: the head reads the whole of it at the receiver."""
    donor, (engine, address), name = bench.engine, receiver, f"moves-{depth}"
    sampling = Sampling(max_tokens=110, ignore_eos=True)

    def request(sample_id: str, response: tuple[int, ...] = ()) -> EngineRequest:
        return EngineRequest(sample_id, PROMPT, response, sampling, 77)

    donor.run(eagle3_runs.add, request(f"{name}-stayed"))
    stayed, _, _ = donor.run(eagle3_runs.go_on, f"{name}-stayed", 0)
    donor.run(eagle3_runs.add, request(name))
    tokens, _, _ = donor.run(eagle3_runs.go_on, name, depth, 30)
    # Whole blocks while it decodes on, then the rest.
    exported = donor.run(eagle3_runs.export, name)
    asked = request(f"{name}-moved", tuple(tokens))
    reserved = engine.run(eagle3_runs.reserve, asked, len(PROMPT) + len(tokens) + 60)
    engine.run(eagle3_runs.expect, reserved.blocks, reserved.shared_blocks * BLOCK)
    shared, whole = reserved.shared_blocks, exported.tokens // BLOCK
    first = KvPart(shared * BLOCK, (whole - shared) * BLOCK, exported.blocks[shared:whole])
    donor.run(eagle3_runs.send, address, first)
    more, _, _ = donor.run(eagle3_runs.go_on, name, depth, 9)
    paused = donor.run(eagle3_runs.pause, exported)
    rest = KvPart(whole * BLOCK, paused.tokens - whole * BLOCK, paused.blocks[whole:])
    donor.run(eagle3_runs.send, address, rest)
    engine.run(eagle3_runs.enter, asked.sample_id, more)
    donor.run(eagle3_runs.leave, name)
    after, proposals, rows = engine.run(eagle3_runs.go_on, asked.sample_id, DEPTH)
    assert [*tokens, *more, *after] == stayed
    # Nothing of it was computed again: its first step there decoded, and made it known; the next verified a draft.
    assert rows[:2] == [1, 1 + DEPTH]
    found = Rolled(tokens={asked.sample_id: stayed}, proposals={asked.sample_id: proposals})
    bench.check((asked,), found, least=5)
