"""Let samples leave and enter vLLM's engine with their KV, between two steps.

A decoding sample has valid KV for all of its tokens but the last. To leave, it is removed from the running samples,
which keeps its blocks and the worker's state of it; later it is put back or ended. To enter, blocks are allocated
to a request that the scheduler does not know yet. When its KV is in them, the sample is set up as if it had been
running here all along, so none of its KV is computed again and its earlier tokens stay output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request, RequestStatus

from services.generation.engine.kept_kv import keep_apart
from services.generation.engine.text import StopStrings
from services.generation.engine.types import EngineRequest, Exported, KvSpace, Reserved
from services.generation.kv_transfer.block_store import Geometry, UnsupportedCaches
from services.generation.kv_transfer.reason import NotMoved, Reason


class EngineMigration:
    """Samples of one engine in transit. For the engine thread only."""

    def __init__(
        self,
        core: Any,
        make_request: Callable[[EngineRequest], Request],
        stops: StopStrings,
        coupled: bool,
        *,
        refusal: str = "",
        slots: bool = False,
    ) -> None:
        """Migrate samples of an engine core.

        Args:
            core: vLLM's engine core.
            make_request: builds vLLM's request of a sample, with its prefix as output.
            stops: stop strings of the samples.
            coupled: True if our runner is in use.
            refusal: why KV of this model is not moved; "" if it is.
            slots: True on V2. There are as many slots as samples may run, every sample that the workers know has
                one, and a sample that is not running must give its slot back. V2 gets all data of a resumed sample
                from the scheduler.
        """
        self._core = core
        self._scheduler: Any = core.scheduler
        self._make_request = make_request
        self._stops = stops
        self._coupled = coupled
        self._refusal = refusal
        self._slots = slots
        # Requests that have blocks and are unknown to the scheduler, and samples that are paused.
        self._reserved: dict[str, Request] = {}
        self._paused: set[str] = set()
        # Reserved samples whose KV is of several versions of the weights.
        self._mixed: set[str] = set()
        # Called for each reservation that the engine drops. Nothing may write to its blocks after it has returned.
        self.on_withdrawn: Callable[[str], None] = lambda sample_id: None

    # -- the workers --------------------------------------------------------------------------------------

    def open_ports(self, chunk_bytes: int, senders: int, agent: str = "") -> Geometry:
        """Create the port of every rank (see `KvPort`); returns their common geometry.

        KV travels by NIXL if an `agent` is named.

        Raises:
            UnsupportedCaches: the KV of this model cannot be moved.
        """
        if self._refusal:
            raise UnsupportedCaches(self._refusal)
        scheduler = self._scheduler
        blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        args = (blocks, scheduler.block_size, chunk_bytes, senders, agent)
        geometries: list[Geometry] = self._core.collective_rpc("open_kv_port", args=args)
        return geometries[0]

    def own_port(self) -> Any:
        """Return the port of the only rank, which is in this process."""
        return self._core.collective_rpc("own_kv_port")[0]

    def call_ports(self, method: str, *args: object) -> list[Any]:
        """Call a method of every rank's port; returns the answers by rank.

        Raises:
            NotMoved: a rank raised it.
        """
        answers: list[Any] = self._core.collective_rpc("call_kv_port", args=(method, *args))
        for answer in answers:
            if isinstance(answer, NotMoved):
                raise answer
        return answers

    # -- leaving ------------------------------------------------------------------------------------------

    def blocks_of(self, sample_id: str) -> int:
        """Return the number of KV blocks that a sample holds."""
        return len(self._scheduler.kv_cache_manager.get_block_ids(sample_id)[0])

    def export(self, sample_id: str) -> Exported:
        """Return the present KV of a sample. Its full blocks are never written again, unless it is preempted.

        Raises:
            NotMoved: it is not decoding.
        """
        request = self._decoding(sample_id)
        blocks = self._scheduler.kv_cache_manager.get_block_ids(sample_id)[0]
        count = -(-request.num_computed_tokens // self._scheduler.block_size)
        return Exported(
            sample_id, request.num_computed_tokens, tuple(blocks[:count]), request.num_preemptions
        )

    def pause(self, exported: Exported) -> Exported:
        """Keep a sample out of further steps; returns its KV.

        Raises:
            NotMoved: it is not decoding, or was preempted since it was exported.
        """
        now = self.export(exported.sample_id)
        if now.preemptions != exported.preemptions:
            raise NotMoved(Reason.PREEMPTED, "the donor preempted the sample")
        request = self._scheduler.requests[exported.sample_id]
        self._scheduler.running.remove(request)
        request.spec_token_ids = []
        if self._slots:
            self._scheduler.leave(exported.sample_id)
            self._core.collective_rpc("release_sample", args=(exported.sample_id,))
        self._paused.add(exported.sample_id)
        return now

    def resume(self, sample_id: str) -> None:
        """Let a paused sample decode again. One that has ended meanwhile is ignored."""
        if sample_id in self._paused:
            self._paused.discard(sample_id)
            self._run(self._scheduler.requests[sample_id])

    def forget(self, sample_id: str) -> None:
        """Forget that a sample is paused, because it has ended."""
        self._paused.discard(sample_id)

    def _decoding(self, sample_id: str) -> Request:
        request = self._scheduler.requests.get(sample_id)
        if request is None:
            raise NotMoved(Reason.UNKNOWN_SAMPLE, "there is no such sample")
        if sample_id in self._paused:
            raise NotMoved(Reason.IN_TRANSIT, "the sample is being moved")
        if request.status != RequestStatus.RUNNING:
            reason = Reason.PREEMPTED if request.num_preemptions else Reason.NOT_DECODING
            raise NotMoved(reason, "the sample waits")
        if request.num_computed_tokens != request.num_tokens - 1:
            raise NotMoved(Reason.NOT_DECODING, "the prompt of the sample is being read")
        return request

    # -- entering -----------------------------------------------------------------------------------------

    @property
    def space(self) -> KvSpace:
        """Present KV blocks; reserved ones count as used."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return KvSpace(pool.get_num_free_blocks(), pool.num_gpu_blocks - 1, self._scheduler.block_size)

    @property
    def free_capacity(self) -> int:
        """Number of samples that can be received. Running, waiting, paused and expected samples hold seats."""
        scheduler = self._scheduler
        taken = len(scheduler.running) + len(scheduler.waiting) + len(scheduler.kv_holding_waiting)
        taken += len(self._paused) + len(self._reserved)
        return max(scheduler.max_num_running_reqs - taken, 0)

    def reserve(self, request: EngineRequest, capacity: int) -> Reserved:
        """Allocate blocks for `capacity` tokens of an arriving sample; its prefix is the response so far.

        It shares no blocks if its KV is of several versions: those in the prefix cache are of the present one.

        Raises:
            NotMoved: there are not enough blocks, or no seat is free. Nothing has changed then.
        """
        if not self.free_capacity:
            raise NotMoved(Reason.FULL, "the engine runs as many samples as it may")
        manager, size = self._scheduler.kv_cache_manager, self._scheduler.block_size
        sample = self._make_request(request)
        # As for a resumed sample: more than its prompt may be in the prefix cache.
        sample.status, sample.num_preemptions = RequestStatus.PREEMPTED, 1
        found, hit = manager.empty_kv_cache_blocks, 0
        if not request.mixed_kv:
            found, hit, _ = manager.get_computed_blocks(sample)
        shared = hit // size
        needed = -(-capacity // size) - shared
        # Every running sample will soon need another block.
        if needed + len(self._scheduler.running) > self.space.free_blocks:
            raise NotMoved(Reason.NO_KV, f"{needed} blocks are needed, {self.space.free_blocks} free")
        computed = KVCacheBlocks(tuple(group[:shared] for group in found.blocks))
        slots = manager.allocate_slots(
            sample,
            capacity - shared * size,
            num_new_computed_tokens=shared * size,
            new_computed_blocks=computed,
            delay_cache_blocks=True,
        )
        if slots is None:
            raise NotMoved(Reason.NO_KV, f"{needed} blocks could not be allocated")
        self._reserved[request.sample_id] = sample
        if request.mixed_kv:
            self._mixed.add(request.sample_id)
        self._stops.begin(request.sample_id, request.sampling, request.prefix)
        return Reserved(request.sample_id, tuple(manager.get_block_ids(request.sample_id)[0]), shared)

    def adopt(self, sample: Request, request: EngineRequest) -> None:
        """Prepare to resume a sample from its prefix: vLLM sees a preempted request, whose tokens are output."""
        if not self._coupled:
            raise ValueError("a sample with a prefix needs the coupled runner")
        sample.status = RequestStatus.PREEMPTED
        # vLLM asserts that a first prefill finds no more than the prompt in the prefix cache. The output of a
        # resumed sample may be cached as well, if this engine generated it.
        sample.num_preemptions = 1
        if self._slots:
            return
        blocks: tuple[list[int], ...] = tuple([] for _ in self._scheduler.kv_cache_config.kv_cache_groups)
        args = (request.sample_id, list(request.prompt), list(request.prefix), sample.sampling_params, blocks)
        self._core.collective_rpc("adopt_sample", args=args)

    def enter(self, sample_id: str, new_tokens: list[int]) -> None:
        """Run a reserved sample whose KV is complete, with the response tokens generated since the reservation.

        Raises:
            NotMoved: the reservation was dropped.
        """
        sample = self._reserved.pop(sample_id, None)
        if sample is None:
            raise NotMoved(Reason.WITHDRAWN, "the reservation was dropped")
        sample.append_output_token_ids(new_tokens)
        self._stops.skip(sample_id, new_tokens)
        manager = self._scheduler.kv_cache_manager
        sample.num_computed_tokens = sample.num_tokens - 1
        if sample_id in self._mixed:
            self._mixed.discard(sample_id)
            keep_apart(manager, sample_id)
        else:
            manager.cache_blocks(sample, sample.num_computed_tokens)
        if not self._slots:
            prompt, output = list(sample.prompt_token_ids or ()), list(sample.output_token_ids)
            args = (sample_id, prompt, output, sample.sampling_params, manager.get_block_ids(sample_id))
            self._core.collective_rpc("adopt_sample", args=args)
        self._scheduler.requests[sample_id] = sample
        self._run(sample)

    def cancel(self, sample_id: str) -> None:
        """Free a reservation; nothing may write to its blocks any more. Unknown ones are ignored."""
        sample = self._reserved.pop(sample_id, None)
        self._mixed.discard(sample_id)
        if sample is not None:
            self._stops.end(sample_id)
            self._scheduler.kv_cache_manager.free(sample)

    def withdraw_all(self, *, preempt: bool) -> None:
        """Drop every reservation, because blocks must be free before KV is dropped.

        With `preempt`, also drop the KV of samples that keep it while they wait for a seat, which vLLM does not
        count as running.
        """
        for sample_id in list(self._reserved):
            self.on_withdrawn(sample_id)
            self.cancel(sample_id)
        scheduler = self._scheduler
        for sample in list(scheduler.kv_holding_waiting) if preempt else ():
            scheduler.kv_holding_waiting.remove_requests([sample])
            scheduler.kv_cache_manager.free(sample)
            sample.num_computed_tokens = 0
            sample.num_preemptions += 1
            scheduler.waiting.prepend_request(sample)

    def _run(self, sample: Request) -> None:
        """Run a sample that has KV; if no seat is free, it waits for the next one."""
        scheduler = self._scheduler
        if len(scheduler.running) < scheduler.max_num_running_reqs:
            sample.status = RequestStatus.RUNNING
            scheduler.running.append(sample)
            if self._slots:
                scheduler.adopt(sample)
        else:
            sample.status = RequestStatus.PREEMPTED
            scheduler._enqueue_waiting_request(sample)
