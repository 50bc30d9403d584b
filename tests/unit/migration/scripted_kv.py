"""A scripted engine whose samples have KV and can move, and instances made of it: real services, no model.

The KV of a token is a function of the position and the token, so that a sample that arrives with KV that is not its
own, or not all of it, is found out at once.
"""

from __future__ import annotations

import asyncio
import pickle
import time
from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import grpc
import torch
from prometheus_client import CollectorRegistry

from paceline.internal.v1 import generation_pb2_grpc as generation_rpc
from paceline.internal.v1 import migration_pb2_grpc as migration_rpc
from services.contracts.errors import Unavailable
from services.contracts.sampling import ModelLimits
from services.generation.config import GenerationConfig
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.engine.types import (
    EngineLoad,
    EngineRequest,
    EngineSampleState,
    Exported,
    KvSpace,
    Reserved,
    SampleStep,
)
from services.generation.kv_transfer.block_store import Geometry
from services.generation.kv_transfer.port import KvPort, KvWorkerMixin
from services.generation.kv_transfer.reason import NotMoved, Reason
from services.generation.loop.engine_loop import EngineLoop
from services.generation.loop.metrics import EngineMetrics
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.loop.samples import SampleTable
from services.generation.loop.work_items import AdmissionTerms
from services.generation.migration.metrics import MigrationMetrics
from services.generation.migration.migration import Migration
from services.generation.server.generation_service import GenerationService
from services.generation.server.sample_intake import SampleIntake
from services.generation.server.weight_updates import AppliedWeights, replace_weights
from services.generation.speculation.plan import FixedLengthPlanner
from services.generation.speculation.speculation import Speculation
from tests.unit.generation.scripted import ScriptedEngine

SIZE, HEADS, CONTENT, LAYERS = 8, 2, 4, 2
MODEL_LEN = 4096
VERSION = 5
# Seconds of a step: long enough for a move to span some, and for the machine to do other things.
PACE = 0.001
# Response tokens at which samples wait: on no machine do they end, or outgrow what is reserved for them, before
# a test has done to them what it is about. Their last block of KV is not full then.
MOST = 150


class KvEngine(ScriptedEngine):
    """A scripted engine that keeps a block table and real tensors for its samples, at a pace of its own.

    Samples that have `most` response tokens stay in the engine and decode no further.
    """

    pace = PACE
    most = MOST

    @classmethod
    def hurry(cls) -> None:
        """Let all samples of all engines end, soon: nothing more is to happen to them."""
        cls.pace, cls.most = 0.00005, 1 << 30

    def __init__(self, blocks: int = 1024, seats: int = 16, ranks: int = 1) -> None:
        super().__init__(seats=seats, permits=1 << 60, limits=ModelLimits(8192, MODEL_LEN))
        self.step_time = 1.0
        self.migration = ScriptedMigration(self, blocks, ranks)

    def step(self) -> list[SampleStep]:
        time.sleep(self.pace)
        return super().step()

    def _step(self, sample_id: str) -> SampleStep:
        done = super()._step(sample_id)
        if sample_id in self.requests:
            self.migration.write(sample_id)
        return done

    def decoding(self) -> list[EngineSampleState]:
        known = self.migration.known
        return [state for state in super().decoding() if state.sample_id in known]

    def keepable(self) -> list[str]:
        return [each for each in self.migration.known if each not in self.migration.paused]

    def apply_weights(
        self, tensors: Iterable[tuple[str, Any]], *, preempt: bool = False, keep: Collection[str] = ()
    ) -> int:
        self.migration.withdraw_all()
        if preempt:
            for sample_id in self.migration.known.keys() - keep:
                self.migration.preempt(sample_id)
        space, held = self.migration.space, sum(self.migration.blocks_of(each) for each in keep)
        assert space.free_blocks == space.total_blocks - held, "blocks are still in use"
        return super().apply_weights(tensors, preempt=preempt, keep=keep)

    @property
    def has_work(self) -> bool:
        return len(self.requests) > len(self.migration.paused) or self.fault is not None

    @property
    def load(self) -> EngineLoad:
        space = self.migration.space
        running = len(self._running)
        waiting = len(self.requests) - running - len(self.migration.paused)
        return EngineLoad(running, waiting, 1 - space.free_blocks / space.total_blocks)

    @property
    def _running(self) -> list[str]:
        paused, responses = self.migration.paused, self.responses
        running = [each for each in self.requests if each not in paused and len(responses[each]) < self.most]
        return running[: self.seats]

    def _forget(self, sample_id: str) -> None:
        super()._forget(sample_id)
        self.migration.left(sample_id)


class Worker(KvWorkerMixin):
    """A rank; what goes to it and comes from it is pickled, as between processes."""

    def __init__(self, rank: int, blocks: int) -> None:
        self.rank = rank
        caches = [torch.zeros(blocks, HEADS, SIZE, CONTENT) for _ in range(LAYERS)]
        self.model_runner = SimpleNamespace(kv_caches=caches)

    def asked(self, method: str, *args: Any) -> Any:
        return pickle.loads(pickle.dumps(self.call_kv_port(*pickle.loads(pickle.dumps((method, *args))))))


class ScriptedMigration:
    """`MigrationEngine` over a `KvEngine`."""

    def __init__(self, engine: KvEngine, blocks: int, ranks: int = 1) -> None:
        self.engine = engine
        self.workers = [Worker(rank, blocks) for rank in range(ranks)]
        # Of all ranks: a layer of another rank has other KV.
        self.caches = [cache for worker in self.workers for cache in worker.model_runner.kv_caches]
        self.free = list(range(blocks))
        self.tables: dict[str, list[int]] = {}
        # Tokens of each sample that have KV.
        self.known: dict[str, int] = {}
        self.paused: set[str] = set()
        self.reserved: dict[str, EngineRequest] = {}
        self.preemptions: Counter[str] = Counter()
        self.on_withdrawn: Any = lambda sample_id: None
        # The first tokens of these are in the prefix cache, so to speak: whole blocks of KV are there at once.
        self.shared: Sequence[int] = ()
        self._blocks = blocks

    def open_ports(self, chunk_bytes: int, senders: int, agent: str) -> Geometry:
        opened = [each.open_kv_port(self._blocks, SIZE, chunk_bytes, senders, agent) for each in self.workers]
        return opened[0]

    def own_port(self) -> KvPort:
        return self.workers[0].own_kv_port()

    def call_ports(self, method: str, *args: Any) -> list[Any]:
        answers = [worker.asked(method, *args) for worker in self.workers]
        for answer in answers:
            if isinstance(answer, NotMoved):
                raise answer
        return answers

    # -- blocks -------------------------------------------------------------------------------------------

    @property
    def space(self) -> KvSpace:
        return KvSpace(len(self.free), self._blocks, SIZE)

    @property
    def free_capacity(self) -> int:
        return max(self.engine.seats - len(self.engine.requests) - len(self.reserved), 0)

    def blocks_of(self, sample_id: str) -> int:
        return len(self.tables.get(sample_id, ()))

    def write(self, sample_id: str) -> None:
        """KV for all tokens that a sample has but the last, which came out of the step."""
        tokens = self._tokens(sample_id)[:-1]
        self._allocate(sample_id, len(tokens))
        self._fill(sample_id, tokens, self.known.get(sample_id, 0))
        self.known[sample_id] = len(tokens)

    def left(self, sample_id: str) -> None:
        self.paused.discard(sample_id)
        self.known.pop(sample_id, None)
        self.free += self.tables.pop(sample_id, [])

    def preempt(self, sample_id: str) -> None:
        """Take a sample's blocks away, as an engine without free ones does."""
        table = self.tables.pop(sample_id)
        self.free += table
        self.known.pop(sample_id)
        for cache in self.caches:
            cache[table] = -1
        self.preemptions[sample_id] += 1

    def _allocate(self, sample_id: str, tokens: int) -> None:
        table = self.tables.setdefault(sample_id, [])
        while len(table) * SIZE < tokens:
            table.append(self.free.pop())

    def _fill(self, sample_id: str, tokens: Sequence[int], begin: int) -> None:
        table = self.tables[sample_id]
        with torch.inference_mode():
            for position in range(begin, len(tokens)):
                for layer, cache in enumerate(self.caches):
                    cache[table[position // SIZE], :, position % SIZE] = _kv(tokens, position, layer)

    def _tokens(self, sample_id: str) -> list[int]:
        return [*self.engine.requests[sample_id].prompt, *self.engine.responses[sample_id]]

    # -- leaving and entering -----------------------------------------------------------------------------

    def export(self, sample_id: str) -> Exported:
        if sample_id not in self.engine.requests:
            raise NotMoved(Reason.UNKNOWN_SAMPLE, "there is no such sample")
        if sample_id in self.paused:
            raise NotMoved(Reason.IN_TRANSIT, "the sample is being moved")
        if sample_id not in self.known:
            raise NotMoved(Reason.NOT_DECODING, "the prompt of the sample is being read")
        known = len(self._tokens(sample_id)) - 1
        blocks = tuple(self.tables[sample_id][: -(-known // SIZE)])
        return Exported(sample_id, known, blocks, self.preemptions[sample_id])

    def pause(self, exported: Exported) -> Exported:
        now = self.export(exported.sample_id)
        if now.preemptions != exported.preemptions:
            raise NotMoved(Reason.PREEMPTED, "the donor preempted the sample")
        self.paused.add(exported.sample_id)
        return now

    def resume(self, sample_id: str) -> None:
        self.paused.discard(sample_id)

    def reserve(self, request: EngineRequest, capacity: int) -> Reserved:
        if not self.free_capacity:
            raise NotMoved(Reason.FULL, "no seat")
        if -(-capacity // SIZE) > len(self.free):
            raise NotMoved(Reason.NO_KV, "no blocks")
        self.reserved[request.sample_id] = request
        self._allocate(request.sample_id, capacity)
        tokens = [*request.prompt, *request.prefix]
        known = tokens[: len(self.shared)] == self.shared and not request.mixed_kv
        shared = min(len(self.shared), len(tokens) - 1) // SIZE if known else 0
        self._fill(request.sample_id, tokens[: shared * SIZE], 0)
        return Reserved(request.sample_id, tuple(self.tables[request.sample_id]), shared)

    def enter(self, sample_id: str, new_tokens: list[int]) -> None:
        request = self.reserved.pop(sample_id, None)
        if request is None:
            raise NotMoved(Reason.WITHDRAWN, "the reservation was dropped")
        response = [*request.prefix, *new_tokens]
        tokens = [*request.prompt, *response]
        for position in range(len(tokens) - 1):
            block = self.tables[sample_id][position // SIZE]
            for layer, cache in enumerate(self.caches):
                here = cache[block, :, position % SIZE]
                assert torch.all(here == _kv(tokens, position, layer)), f"wrong KV of token {position}"
        self.engine.requests[sample_id] = replace(request, prefix=tuple(response))
        self.engine.responses[sample_id] = response
        self.known[sample_id] = len(tokens) - 1

    def cancel(self, sample_id: str) -> None:
        if self.reserved.pop(sample_id, None) is not None:
            self.left(sample_id)

    def withdraw_all(self) -> None:
        for sample_id in list(self.reserved):
            self.on_withdrawn(sample_id)
            self.cancel(sample_id)


def _kv(tokens: Sequence[int], position: int, layer: int) -> float:
    return float((31 * tokens[position] + 7 * position + layer) % 8191)


@dataclass(slots=True)
class _Instance:
    """What the services use of `services.generation.server.generation_service.GenerationInstance`."""

    loop: EngineLoop
    closed: str = ""

    def terms(self) -> AdmissionTerms:
        return AdmissionTerms(self.loop.policy_version, ModelLimits(8192, MODEL_LEN), self.closed)


class ScriptedInstance:
    """A generation instance over a scripted engine, in this process."""

    def __init__(self, name: str, **settings: Any) -> None:
        self.registry = CollectorRegistry()
        self.engine = KvEngine(
            settings.pop("blocks", 1024), settings.pop("seats", 16), settings.pop("ranks", 1)
        )
        metrics = EngineMetrics(self.registry)
        speculation = Speculation([ReferenceDrafter()], FixedLengthPlanner(4), 8192, metrics)
        drafts = SampleDrafts(metrics, speculation=speculation)
        self.loop = EngineLoop(
            lambda: (self.engine, drafts),
            metrics,
            SampleTable(metrics.background),
            flush_interval=0.01,
            max_waiting=64,
            policy_version=VERSION,
        )
        self.loop.start()
        self.loop.ready.result(60)
        self.instance = _Instance(self.loop)
        common = {
            "migration_timeout_seconds": 60.0,
            "migration_stall_seconds": 20.0,
            "migration_claim_seconds": 60.0,
            "migration_chunk_bytes": 4096,
        }
        config = GenerationConfig(
            model=settings.pop("model", "tiny"), instance_id=name, **(common | settings)
        )
        terms = self.instance.terms
        self.migration = Migration(config, self.loop, terms, None, MigrationMetrics(self.registry))
        claim = self.migration.arrivals.claim
        self.intake = SampleIntake(self.loop, terms, None, claim, metrics.rollouts, 1.0)
        self.server = grpc.aio.server()
        self.address = ""

    async def open(self) -> None:
        service = GenerationService(self.instance, self.intake, None)  # type: ignore[arg-type]
        generation_rpc.add_GenerationServiceServicer_to_server(service, self.server)
        migration_rpc.add_MigrationServiceServicer_to_server(self.migration, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.address = f"127.0.0.1:{port}"
        await self.migration.open(self.address)
        await self.server.start()

    async def close(self) -> None:
        await self.migration.close()
        await self.server.stop(0)
        await self.end()

    async def end(self) -> None:
        """Stop the engine."""
        with suppress(Unavailable):
            await asyncio.wrap_future(self.loop.stop())

    async def between_steps(self, act: Any) -> Any:
        return await asyncio.wrap_future(self.loop.call(act))

    async def apply_weights(self, version: int, *, goes_on: bool = False, keep_kv: bool = False) -> int:
        """Apply weights as `WeightUpdates` does; return how many samples keep their KV."""
        end_unclaimed, how = self.migration.arrivals.end_unclaimed, {"in_flight": goes_on, "keep_kv": keep_kv}
        replaced: AppliedWeights = await self.between_steps(
            lambda: replace_weights(self.loop, version, lambda: (), end_unclaimed, **how)
        )
        return replaced.kept

    def pass_deadlines(self) -> None:
        """Let the deadlines of the samples that have been reserved or not been claimed be over."""
        self.migration.arrivals._clock = lambda: time.monotonic() + 3600.0

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"paceline_migration_{name}", labels) or 0.0


@asynccontextmanager
async def scripted(count: int = 2, **settings: Any) -> AsyncIterator[list[ScriptedInstance]]:
    """Some instances."""
    async with AsyncExitStack() as stack:
        made = [ScriptedInstance(f"i{each}", **settings) for each in range(count)]
        for each in made:
            await each.open()
            stack.push_async_callback(each.close)
        yield made
