"""What the tests of the EAGLE-3 head do beside a real engine; run over there by a `RemoteEngine`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from services.generation.engine.types import EAGLE3, Eagle3Options, EngineRequest, Exported, Reserved
from services.generation.kv_transfer.transfers import KvPart

TOKEN = b"t" * 32
WAIT = 20.0


def swap(engine: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Draft with another head."""
    engine.swap_drafter(EAGLE3, tensors)


def swap_asleep(engine: Any, tensors: Mapping[str, torch.Tensor]) -> bool:
    """Draft with another head, which comes while the engine sleeps; whether it slept on."""
    engine.sleep()
    engine.swap_drafter(EAGLE3, tensors)
    slept: bool = engine.asleep
    engine.wake()
    engine.model_drafts[EAGLE3].build(0.0)
    return slept


def apply(engine: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[bool, bool]:
    """Apply weights of the policy; whether the head is ready at once, and whether it is when it was asked."""
    engine.apply_weights(tensors.items())
    drafts = engine.model_drafts[EAGLE3]
    at_once = drafts.ready
    return at_once, drafts.build(0.0)


def fail_to_swap(engine: Any, tensors: Mapping[str, torch.Tensor]) -> tuple[bool, bool]:
    """Give it weights that were not checked; whether that raised, and whether it drafts still."""
    try:
        engine.swap_drafter(EAGLE3, tensors)
    except Exception:
        return True, engine.model_drafts[EAGLE3].ready
    return False, engine.model_drafts[EAGLE3].ready


def _make(worker: Any, checkpoint: str) -> None:
    from services.generation.engine.draft_models.eagle3 import Eagle3Model

    Eagle3Model(worker.model_runner, Eagle3Options(checkpoint))


def make_head(engine: Any, checkpoint: str) -> None:
    """Make another head beside the one that there is."""
    engine._core.collective_rpc(_make, args=(checkpoint,))


def imported(engine: Any, *architectures: str) -> list[bool]:
    """Whether vLLM has the classes of architectures, and need not inspect them in another process."""
    from vllm.model_executor.models.registry import ModelRegistry, _RegisteredModel

    return [isinstance(ModelRegistry.models[each], _RegisteredModel) for each in architectures]


def memory(engine: Any) -> tuple[int, int]:
    """Bytes of the head's weights, and KV blocks of the engine."""
    blocks = engine._scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    return engine.model_drafts[EAGLE3].nbytes, blocks


def listen(engine: Any) -> str:
    """Open the engine's port for KV; its address."""
    migration = engine.migration
    migration.open_ports(1 << 16, 2)
    (port,) = migration.call_ports("listen", "127.0.0.1", 0, None)
    return f"127.0.0.1:{port}"


def send(engine: Any, address: str, part: KvPart) -> Any:
    """Send KV to another engine's port."""
    return engine.migration.own_port().send("m", [address], TOKEN, WAIT, part).result(WAIT)


def expect(engine: Any, blocks: tuple[int, ...], tokens: int) -> None:
    """Be ready for that."""
    engine.migration.call_ports("expect", "m", TOKEN, blocks, tokens, WAIT)


def reserve(engine: Any, request: EngineRequest, capacity: int) -> Reserved:
    """See `EngineMigration`."""
    reserved: Reserved = engine.migration.reserve(request, capacity)
    return reserved


def enter(engine: Any, sample_id: str, new_tokens: list[int]) -> None:
    """Run a reserved sample, whose KV is there."""
    engine.migration.call_ports("drop", "m")
    engine.migration.enter(sample_id, new_tokens)


def export(engine: Any, sample_id: str) -> Exported:
    """See `EngineMigration`."""
    exported: Exported = engine.migration.export(sample_id)
    return exported


def pause(engine: Any, exported: Exported) -> Exported:
    """See `EngineMigration`."""
    now: Exported = engine.migration.pause(exported)
    return now


def leave(engine: Any, sample_id: str) -> None:
    """End a sample that runs elsewhere."""
    engine.abort([sample_id])
    engine.migration.call_ports("end", "m")


def add(engine: Any, request: EngineRequest) -> None:
    """Queue a sample."""
    engine.add(request)


def go_on(
    engine: Any, sample_id: str, depth: int, steps: int = 0
) -> tuple[list[int], list[tuple[int, list[int], list[float]]], list[int]]:
    """So many steps of the only sample, 0: to its end; its tokens, proposals, and the rows of each step."""
    tokens: list[int] = []
    proposals: list[tuple[int, list[int], list[float]]] = []
    rows = []
    while engine.has_work:
        states = [state for state in engine.decoding() if depth and state.room > 0]
        made = engine.model_drafts[EAGLE3].propose({each.sample_id: min(depth, each.room) for each in states})
        for state in states:
            if (proposal := made.proposals.get(state.sample_id)) is not None:
                proposals.append((len(state.response), proposal.tokens, proposal.logprobs))
        engine.put_drafts({key: proposal.tokens for key, proposal in made.proposals.items()})
        for step in engine.step():
            assert step.sample_id == sample_id
            tokens += step.token_ids
            rows.append(1 + step.drafted)
        if len(rows) == steps:
            break
    return tokens, proposals, rows
