"""What migration has to do with vLLM: samples leave and enter the engine with their KV, between two steps.

A sample that decodes has valid KV for all of its tokens but the last. Leaving: it is taken off the running samples,
which keeps its blocks and what the worker knows of it, and is put back or ended. Entering: blocks are allocated to
a request that the scheduler does not know yet; when its KV is in them the sample is made to look as if it had been
running here all along, so nothing of it is computed again, and what it had generated stays output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request, RequestStatus

from services.generation.engine.types import SampleRequest
from services.generation.migration.engine import Exported, KvSpace, Reserved
from services.generation.migration.reason import NotMoved, Reason
from services.generation.migration.store import Geometry, UnsupportedCaches


class EngineMigration:
    """Samples in transit of one engine. Called by the engine's thread only, as the engine itself."""

    def __init__(self, core: Any, make_request: Callable[[SampleRequest], Request], coupled: bool) -> None:
        """
        Args:
            core: vLLM's engine core.
            make_request: vLLM's form of a sample, its prefix as output.
            coupled: whether our runner is in use.
        """
        self._core = core
        self._scheduler: Any = core.scheduler
        self._make_request = make_request
        self._coupled = coupled
        # Requests that have blocks and are unknown to the scheduler, and samples that are frozen.
        self._reserved: dict[str, Request] = {}
        self._frozen: set[str] = set()
        # Called for each reservation that is dropped for the engine's sake; nothing writes to it when it returns.
        self.on_withdrawn: Callable[[str], None] = lambda sample_id: None

    # -- the workers --------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        """Workers; each has the KV of a part of the heads."""
        count: int = self._scheduler.vllm_config.parallel_config.tensor_parallel_size
        return count

    def open_ports(self, chunk_bytes: int, senders: int, agent: str = "") -> Geometry:
        """Make the port of every rank (see `KvPort`); the geometry that they have in common.

        With the name of an `agent` KV goes by NIXL.

        Raises:
            UnsupportedCaches: the KV of this model cannot be moved.
        """
        if not self._coupled:
            raise UnsupportedCaches("samples of vLLM's own sampler are not moved")
        scheduler = self._scheduler
        if len(scheduler.kv_cache_config.kv_cache_groups) != 1 or scheduler.needs_kv_cache_zeroing:
            raise UnsupportedCaches("the model has several kinds of KV")
        if scheduler.vllm_config.parallel_config.pipeline_parallel_size != 1:
            raise UnsupportedCaches("the model's layers are on several devices")
        blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        args = (blocks, scheduler.block_size, chunk_bytes, senders, agent)
        geometries: list[Geometry] = self._core.collective_rpc("open_kv_port", args=args)
        return geometries[0]

    def own_port(self) -> Any:
        """The port of the only rank, which is in this process."""
        return self._core.collective_rpc("own_kv_port")[0]

    def call_ports(self, method: str, *args: object) -> list[Any]:
        """Call a method of every rank's port; the answers by rank.

        Raises:
            NotMoved: that of a rank.
        """
        answers: list[Any] = self._core.collective_rpc("call_kv_port", args=(method, *args))
        for answer in answers:
            if isinstance(answer, NotMoved):
                raise answer
        return answers

    # -- leaving ------------------------------------------------------------------------------------------

    def blocks_of(self, sample_id: str) -> int:
        """KV blocks that a sample in the engine holds."""
        return len(self._scheduler.kv_cache_manager.get_block_ids(sample_id)[0])

    def export(self, sample_id: str) -> Exported:
        """The KV that a sample has now. Its whole blocks are not written to any more while it is not preempted.

        Raises:
            NotMoved: it is not decoding.
        """
        request = self._decoding(sample_id)
        blocks = self._scheduler.kv_cache_manager.get_block_ids(sample_id)[0]
        count = -(-request.num_computed_tokens // self._scheduler.block_size)
        return Exported(
            sample_id, request.num_computed_tokens, tuple(blocks[:count]), request.num_preemptions
        )

    def freeze(self, exported: Exported) -> Exported:
        """Keep a sample out of the coming steps; the KV that it has.

        Raises:
            NotMoved: it is not decoding, or was preempted since it was exported.
        """
        now = self.export(exported.sample_id)
        if now.preemptions != exported.preemptions:
            raise NotMoved(Reason.PREEMPTED, "the donor preempted the sample")
        request = self._scheduler.requests[exported.sample_id]
        self._scheduler.running.remove(request)
        request.spec_token_ids = []
        self._frozen.add(exported.sample_id)
        return now

    def thaw(self, sample_id: str) -> None:
        """Let a frozen sample go on here. One that has ended meanwhile is passed over."""
        if sample_id in self._frozen:
            self._frozen.discard(sample_id)
            self._run(self._scheduler.requests[sample_id])

    def forget(self, sample_id: str) -> None:
        """A sample has ended: it is not frozen any more."""
        self._frozen.discard(sample_id)

    def _decoding(self, sample_id: str) -> Request:
        request = self._scheduler.requests.get(sample_id)
        if request is None:
            raise NotMoved(Reason.UNKNOWN_SAMPLE, "there is no such sample")
        if sample_id in self._frozen:
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
        """KV blocks now. Reservations count as used."""
        pool = self._scheduler.kv_cache_manager.block_pool
        return KvSpace(pool.get_num_free_blocks(), pool.num_gpu_blocks - 1, self._scheduler.block_size)

    @property
    def free_seats(self) -> int:
        """How many samples could be received now: those that run, wait, are frozen or expected have seats."""
        scheduler = self._scheduler
        taken = len(scheduler.running) + len(scheduler.waiting) + len(scheduler.kv_holding_waiting)
        taken += len(self._frozen) + len(self._reserved)
        return max(scheduler.max_num_running_reqs - taken, 0)

    def reserve(self, request: SampleRequest, capacity: int) -> Reserved:
        """Allocate blocks for so many tokens of a sample, prompt and response, whose prefix is its response so far.

        Raises:
            NotMoved: there are not enough, or no seat is free. Then nothing has changed.
        """
        if not self.free_seats:
            raise NotMoved(Reason.NO_SEAT, "the engine runs as many samples as it may")
        manager, size = self._scheduler.kv_cache_manager, self._scheduler.block_size
        sample = self._make_request(request)
        # As for a sample that resumes: more than its prompt may be in the prefix cache.
        sample.status, sample.num_preemptions = RequestStatus.PREEMPTED, 1
        found, hit, _ = manager.get_computed_blocks(sample)
        shared = hit // size
        needed = -(-capacity // size) - shared
        # Every running sample will want another block some time soon.
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
        return Reserved(request.sample_id, tuple(manager.get_block_ids(request.sample_id)[0]), shared)

    def enter(self, sample_id: str, new_tokens: list[int]) -> None:
        """Run a reserved sample, with the response tokens that it got since. All of its KV is in its blocks.

        Raises:
            NotMoved: the reservation was dropped.
        """
        sample = self._reserved.pop(sample_id, None)
        if sample is None:
            raise NotMoved(Reason.WITHDRAWN, "the reservation was dropped")
        sample.append_output_token_ids(new_tokens)
        manager = self._scheduler.kv_cache_manager
        sample.num_computed_tokens = sample.num_tokens - 1
        manager.cache_blocks(sample, sample.num_computed_tokens)
        prompt, output = list(sample.prompt_token_ids or ()), list(sample.output_token_ids)
        args = (sample_id, prompt, output, sample.sampling_params, manager.get_block_ids(sample_id))
        self._core.collective_rpc("adopt_sample", args=args)
        self._scheduler.requests[sample_id] = sample
        self._run(sample)

    def cancel(self, sample_id: str) -> None:
        """Free a reservation. Nothing may write to its blocks any more. Unknown ones are passed over."""
        sample = self._reserved.pop(sample_id, None)
        if sample is not None:
            self._scheduler.kv_cache_manager.free(sample)

    def withdraw_all(self) -> None:
        """Drop every reservation: their blocks must be free before KV is dropped."""
        for sample_id in list(self._reserved):
            self.on_withdrawn(sample_id)
            self.cancel(sample_id)

    def _run(self, sample: Request) -> None:
        """Put a sample with KV among the running ones; where its seat was taken it is the next that gets one."""
        scheduler = self._scheduler
        if len(scheduler.running) < scheduler.max_num_running_reqs:
            sample.status = RequestStatus.RUNNING
            scheduler.running.append(sample)
        else:
            sample.status = RequestStatus.PREEMPTED
            scheduler._enqueue_waiting_request(sample)
