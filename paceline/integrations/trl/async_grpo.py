"""Parts of asynchronous GRPO that do not need TRL: continuous generation, scores, and weight transfer.

A bounded number of groups is generated continuously, across updates of the weights. `async_worker` connects these
parts to TRL's AsyncGRPOTrainer.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from paceline import types as t
from paceline.errors import FailedPreconditionError, PacelineError, ResourceExhaustedError, UnimplementedError
from paceline.prompts import prompt_id_of

if TYPE_CHECKING:
    from paceline.client import OpenBatch, Run


_log = logging.getLogger("paceline")

# Samples of one open batch. A batch keeps its prompts, here and in the gateway, until it has ended.
_MOST_SAMPLES = 16_384
# Samples after which rewards are reported and read samples are acknowledged.
_SETTLE_EVERY = 256


@dataclass(frozen=True, slots=True)
class GroupScores:
    """Rewards and advantages of the samples of a group, computed as by TRL's own asynchronous worker."""

    rewards: npt.NDArray[np.float64]
    """[samples], summed over the functions; NaN if no function gave one."""
    advantages: npt.NDArray[np.float64]
    """[samples], in units of the group's standard deviation; 0 without a reward."""
    metrics: tuple[dict[str, float], ...]
    """[samples], metrics that the trainer logs for each sample."""


def score(by_function: Mapping[str, Sequence[float | None]], samples: int) -> GroupScores:
    """Combine the rewards of several functions, [samples] each; None is no reward.

    ValueError: a function gave a wrong number of rewards; it is named.
    """
    for name, given in by_function.items():
        if len(given) != samples:
            raise ValueError(f"reward function {name} gave {len(given)} rewards for {samples} completions")
    table = np.array(
        [[np.nan if each is None else float(each) for each in given] for given in by_function.values()]
    )
    known = ~np.isnan(table).all(axis=0)
    rewards = np.where(known, np.nansum(table, axis=0), np.nan)
    advantages = np.zeros(samples)
    mean = deviation = float("nan")
    if known.any():
        mean, deviation = float(rewards[known].mean()), float(rewards[known].std())
        # If all rewards are equal, all advantages are 0; the constant avoids a division by zero.
        advantages[known] = (rewards[known] - mean) / (deviation + 1e-8)
    metrics = tuple(
        {"reward": float(rewards[sample]), "reward_std": deviation}
        | {f"rewards/{name}": float(row[sample]) for name, row in zip(by_function, table, strict=True)}
        for sample in range(samples)
    )
    return GroupScores(rewards, advantages, metrics)


class PacelineWeightTransfer:
    """The `weight_transfer` of an AsyncGRPOTrainer: each synchronisation is a push of the run.

    Samples continue under the old weights while the new ones are sent, and use the new ones from their next token
    on, so `pause` and `resume` have nothing to do. For a PEFT model the trainer sends weights with the adapter
    merged.
    """

    def __init__(self, run: Run, *, in_flight: t.InFlight = t.InFlight.CONTINUE) -> None:
        """Push by a run, which the caller closes after training.

        `in_flight` is the treatment of unfinished samples of any run. A worker always has some, so REFUSE would
        refuse every push but the first.
        """
        self._run = run
        self._in_flight = in_flight
        self._pushed: list[int] = []
        """Policy version of each push."""

    @property
    def pushes(self) -> int:
        """Number of pushes so far."""
        return len(self._pushed)

    def push_of(self, policy_version: int) -> int:
        """Return the number of the push, from 1, that brought a policy version; 0 for a version before all pushes.

        A version that is newer than all pushes belongs to the push that is just ending.
        """
        newer = bool(self._pushed) and policy_version > self._pushed[-1]
        return bisect_right(self._pushed, policy_version) + newer

    def init_weight_transfer(self) -> None:
        """Do nothing: each push connects by itself."""

    def pause(self) -> None:
        """Do nothing."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Push the tensors as the next version. When this returns, the fleet serves them.

        The iterator is read to its end even if the push fails, so that other processes, which gather the tensors,
        too, do not wait indefinitely.

        PacelineError: the push was refused; the fleet serves the same version as before.
        """
        try:
            finished = self._run.push_weights(iterator, in_flight=self._in_flight)
        finally:
            for _ in iterator:
                pass
        self._pushed.append(finished.policy_version)

    def resume(self) -> None:
        """Do nothing."""

    def destroy(self) -> None:
        """Do nothing: the run is the caller's."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """Prompt of a data set, for one group."""

    number: int
    """Number of the group, from 0."""
    token_ids: Sequence[int]
    row: Mapping[str, Any]
    """Columns of the data set."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """Parameters of the generation of groups."""

    sampling: t.SamplingParams
    samples: int
    """Samples of a group."""
    most_groups: int
    """Most groups that are generated, or wait to be taken, at once."""
    max_staleness: int
    """Most versions by which a sample's first token may be behind; else the sample is regenerated."""
    exactness: t.Exactness | None = None


@dataclass(slots=True, eq=False)
class _Batch:
    """An open batch with its incomplete groups."""

    opening: Future[OpenBatch] = field(default_factory=Future)
    known: set[str] = field(default_factory=set)
    """Ids of all prompts of the batch."""
    waiting: dict[str, Prompt] = field(default_factory=dict)
    """Prompts that are not added yet, by id."""
    running: dict[str, Prompt] = field(default_factory=dict)
    gathered: dict[str, list[t.Sample]] = field(default_factory=dict)
    """Samples of each running prompt so far."""
    rewards: list[t.Reward] = field(default_factory=list)
    """Rewards that are not reported yet."""
    unsettled: int = 0
    """Number of samples of complete groups that are not acknowledged yet."""

    def add(self, samples: int) -> None:
        """Add the waiting prompts to the batch. They keep waiting if that is refused."""
        # Samples may come before the gateway's answer.
        self.running |= self.waiting
        self.known |= self.waiting.keys()
        try:
            self.opening.result().add(
                [t.Group(each, prompt.token_ids, samples) for each, prompt in self.waiting.items()]
            )
        except PacelineError:
            for each in self.waiting:
                self.running.pop(each, None)
            raise
        self.waiting = {}


class ContinuousGroups:
    """Generator of groups in consecutive open batches of a run; a group is added for each that was taken.

    `take` is called with every complete group, its samples ordered by slot, one group at a time. While it blocks,
    no group is added in its place. It returns a reward for each sample, NaN for none. The number of a batch is
    the step of its samples, so a repeated prompt, which gets into another batch, has different samples.
    """

    def __init__(
        self,
        run: Run,
        prompts: Iterator[Prompt],
        request: GroupRequest,
        take: Callable[[Prompt, list[t.Sample]], Sequence[float]],
    ) -> None:
        """Use a run, and an endless iterator of prompts."""
        self._run = run
        self._prompts = prompts
        self._request = request
        self._take = take
        self._most = max(1, _MOST_SAMPLES // request.samples)
        self._changed = threading.Condition()
        self._room = request.most_groups
        self._reading: dict[_Batch, threading.Thread] = {}
        self._steps = 0
        self._taking = threading.Lock()
        self._reports = True
        self._filler = threading.Thread(target=self._fill, name="paceline-groups", daemon=True)
        self.stopped = threading.Event()
        self.error: Exception | None = None
        """Error that ended the generation."""
        self.last_activity = time.monotonic()
        """Time of the last sample or of the last taken group, on the monotonic clock."""

    def start(self) -> None:
        """Start generating."""
        self.last_activity = time.monotonic()
        self._filler.start()

    def stop(self, seconds: float) -> bool:
        """Cancel all samples. Return False if that took more than `seconds`, for example without a gateway."""
        self._end()
        deadline = time.monotonic() + seconds
        # It starts the readers, and cancels their batches when it ends.
        self._filler.join(seconds)
        readers = self._readers().values()
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        return not (self._filler.is_alive() or any(reader.is_alive() for reader in readers))

    def _fill(self) -> None:
        """Add groups whenever there is room, until the end; then cancel the running batches."""
        try:
            self._add_until_the_end()
        except Exception as error:
            self._fail(error)
        for batch in self._readers():
            try:
                batch.opening.result().cancel()
            except Exception as error:
                _log.warning("unneeded samples could not be cancelled: %s", error)

    def _add_until_the_end(self) -> None:
        current = None
        while room := self._wait_for_room():
            for prompt in islice(self._prompts, room):
                prompt_id = prompt_id_of(prompt.token_ids)
                if current is None or not self._fits(current, prompt_id):
                    if current is not None:
                        self._send(current).opening.result().close()
                    current = self._open()
                current.waiting[prompt_id] = prompt
            if current is not None:
                current = self._send(current)

    def _wait_for_room(self) -> int:
        """Wait for room, and return the number of groups to add; 0 at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._room or self.stopped.is_set())
            room, self._room = self._room, 0
            return 0 if self.stopped.is_set() else room

    def _fits(self, batch: _Batch, prompt_id: str) -> bool:
        """Return True if a prompt can be added to a batch: there is room, and the batch does not have it."""
        if prompt_id in batch.known or prompt_id in batch.waiting:
            return False
        return len(batch.known) + len(batch.waiting) < self._most

    def _send(self, batch: _Batch) -> _Batch:
        """Add the waiting prompts; return their batch, which is a new one if this one is closed or full."""
        if not batch.waiting:
            return batch
        try:
            batch.add(self._request.samples)
            return batch
        except (FailedPreconditionError, ResourceExhaustedError) as error:
            if batch.known == batch.waiting.keys():
                # A new batch would be refused as well.
                raise
            _log.info("groups are added to another batch: %s", error)
        with suppress(FailedPreconditionError):
            # Unless the gateway has closed it, it would stay open, and its reader would wait until the end.
            batch.opening.result().close()
        another = self._open()
        another.waiting = batch.waiting
        another.add(self._request.samples)
        return another

    def _open(self) -> _Batch:
        batch = _Batch()
        reader = threading.Thread(
            target=self._read, args=(batch, self._steps), name=f"paceline-groups-{self._steps}", daemon=True
        )
        self._steps += 1
        with self._changed:
            self._reading[batch] = reader
        reader.start()
        batch.opening.result()
        return batch

    def _read(self, batch: _Batch, step: int) -> None:
        """Open a batch, and take its groups until it ends."""
        try:
            with ExitStack() as leaving:
                opened = self._enter(leaving, step)
                batch.opening.set_result(opened)
                for sample in opened:
                    self.last_activity = time.monotonic()
                    if self._collect(batch, sample) and batch.unsettled >= _SETTLE_EVERY:
                        self._settle(batch, opened)
                self._settle(batch, opened)
        except Exception as error:
            if not batch.opening.done():
                batch.opening.set_exception(error)
            self._fail(error)
        finally:
            with self._changed:
                del self._reading[batch]

    def _enter(self, leaving: ExitStack, step: int) -> OpenBatch:
        """Open a batch that continues across versions of the policy."""
        request = self._request
        return leaving.enter_context(
            self._run.open_batch(
                step,
                request.sampling,
                exactness=request.exactness,
                max_staleness=request.max_staleness,
                stale=t.Stale.REGENERATE,
            )
        )

    def _collect(self, batch: _Batch, sample: t.Sample) -> bool:
        """Keep a sample; return True if it completed its group, which was then taken."""
        prompt = batch.running.get(sample.prompt_id)
        if prompt is None or self.stopped.is_set():
            return False
        group = batch.gathered.setdefault(sample.prompt_id, [])
        group.append(sample)
        if len(group) < self._request.samples:
            return False
        del batch.gathered[sample.prompt_id], batch.running[sample.prompt_id]
        group.sort(key=lambda each: each.slot)
        with self._taking:
            rewards = self._take(prompt, group)
        self.last_activity = time.monotonic()
        batch.rewards += [
            t.Reward(each.prompt_id, each.slot, reward)
            for each, reward in zip(group, rewards, strict=True)
            if math.isfinite(reward)
        ]
        batch.unsettled += len(group)
        with self._changed:
            self._room += 1
            self._changed.notify_all()
        return True

    def _settle(self, batch: _Batch, opened: OpenBatch) -> None:
        """Report rewards, and acknowledge the samples that were read, so that the gateway drops them."""
        rewards, batch.rewards, batch.unsettled = batch.rewards, [], 0
        if rewards and self._reports:
            try:
                opened.report_rewards(rewards)
            except UnimplementedError:
                self._reports = False
        opened.ack()

    def _readers(self) -> dict[_Batch, threading.Thread]:
        with self._changed:
            return dict(self._reading)

    def _fail(self, error: Exception) -> None:
        self.error = self.error or error
        self._end()

    def _end(self) -> None:
        with self._changed:
            self.stopped.set()
            self._changed.notify_all()
