"""The parts of asynchronous GRPO that do not need TRL: continuous generation, scores, and weight transfer.

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
from contextlib import ExitStack
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


@dataclass(frozen=True, slots=True)
class GroupScores:
    """Rewards and advantages of a group's samples, as TRL's AsyncGRPOTrainer has them from a worker of its own."""

    rewards: npt.NDArray[np.float64]
    """[samples], summed over the functions; NaN where none of them gave one."""
    advantages: npt.NDArray[np.float64]
    """[samples], in units of the group's standard deviation; 0 where there is no reward."""
    metrics: tuple[dict[str, float], ...]
    """[samples], what the trainer logs of each."""


def score(by_function: Mapping[str, Sequence[float | None]], samples: int) -> GroupScores:
    """Sum up what the reward functions gave, [samples] each; None is no reward.

    ValueError: a function gave another number of rewards; it is named.
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
        # Where all rewards are equal nothing is learned, and nothing is divided by zero.
        advantages[known] = (rewards[known] - mean) / (deviation + 1e-8)
    metrics = tuple(
        {"reward": float(rewards[sample]), "reward_std": deviation}
        | {f"rewards/{name}": float(row[sample]) for name, row in zip(by_function, table, strict=True)}
        for sample in range(samples)
    )
    return GroupScores(rewards, advantages, metrics)


class PacelineWeightTransfer:
    """The `weight_transfer` of an AsyncGRPOTrainer: each synchronisation is a push of the run.

    Samples go on under the old weights while the new ones are sent, and from their next token under the new ones:
    so `pause` and `resume` have nothing to do. Of a PEFT model the trainer sends weights with the adapter merged.
    """

    def __init__(self, run: Run, *, in_flight: t.InFlight = t.InFlight.CONTINUE) -> None:
        """Push by a run, which the caller closes after training.

        `in_flight` is what becomes of unfinished samples of any run. A worker always has some, so that REFUSE
        would refuse every push but the first.
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
        """Return the number of the push, from 1, that brought a policy version; 0: it was there before.

        One that is newer than all pushes is that of the push which is just ending.
        """
        newer = bool(self._pushed) and policy_version > self._pushed[-1]
        return bisect_right(self._pushed, policy_version) + newer

    def init_weight_transfer(self) -> None:
        """Do nothing: the push that follows connects."""

    def pause(self) -> None:
        """Do nothing."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Push the tensors as the next version. When this returns, the fleet serves them.

        They are read to their end also when that fails, so that other processes, which gather them too, do not
        wait indefinitely. PacelineError: the push was refused; the fleet serves what it served.
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


_log = logging.getLogger("paceline")

# Samples of one open batch, which keeps its prompts, here and in the gateway, until it has ended.
_MOST_SAMPLES = 16_384
# Samples after which rewards are reported, and what was read is acknowledged.
_SETTLE_EVERY = 256


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt of a data set, of which one group is wanted."""

    number: int
    """Of the group, from 0."""
    token_ids: Sequence[int]
    row: Mapping[str, Any]
    """Columns of the data set."""


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """The way in which groups are generated."""

    sampling: t.SamplingParams
    samples: int
    """Samples of a group."""
    most_groups: int
    """Groups that are generated, or wait to be taken, at once."""
    max_staleness: int
    """Versions by which a sample's first token may be behind before the sample is generated anew."""
    exactness: t.Exactness | None = None


@dataclass(slots=True, eq=False)
class _Batch:
    """An open batch, and its groups that are not whole."""

    opening: Future[OpenBatch] = field(default_factory=Future)
    known: set[str] = field(default_factory=set)
    """Ids of all its prompts."""
    waiting: dict[str, Prompt] = field(default_factory=dict)
    """Prompts by id that are not added yet."""
    running: dict[str, Prompt] = field(default_factory=dict)
    gathered: dict[str, list[t.Sample]] = field(default_factory=dict)
    """Samples of each running prompt."""
    rewards: list[t.Reward] = field(default_factory=list)
    """Those that are not reported."""
    unsettled: int = 0
    """Samples of whole groups that are not acknowledged."""

    def add(self, samples: int) -> None:
        """Send what waits. Where that is refused, it still waits."""
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
    """Open batches of a run, one after another, to which a group is added for each that was taken.

    `take` gets every whole group, its samples by slot, one group at a time; while it waits, none is added instead.
    It returns a reward for each sample, NaN for none. The number of a batch is the step of its samples, so that a
    prompt that comes again, which is another batch's, has other samples.
    """

    def __init__(
        self,
        run: Run,
        prompts: Iterator[Prompt],
        request: GroupRequest,
        take: Callable[[Prompt, list[t.Sample]], Sequence[float]],
    ) -> None:
        """Use a run, and prompts that never end."""
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
        """What ended it."""
        self.heard = time.monotonic()
        """Time of the last sample, or of the last group that was taken, on that clock."""

    def start(self) -> None:
        """Begin to generate."""
        self.heard = time.monotonic()
        self._filler.start()

    def stop(self, seconds: float) -> bool:
        """End all samples. Return False if that was not done after so many seconds, as without a gateway."""
        self._end()
        deadline = time.monotonic() + seconds
        # It begins the others, and cancels their batches at its end.
        self._filler.join(seconds)
        readers = self._readers().values()
        for reader in readers:
            reader.join(max(0.0, deadline - time.monotonic()))
        return not (self._filler.is_alive() or any(reader.is_alive() for reader in readers))

    def _fill(self) -> None:
        """Add groups where there is room for them, until the end; then end what runs."""
        try:
            self._add_until_the_end()
        except Exception as error:
            self._fail(error)
        for batch in self._readers():
            try:
                batch.opening.result().cancel()
            except Exception as error:
                _log.warning("samples that nobody waits for could not be cancelled: %s", error)

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
        """Return the number of groups to add, or 0 at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._room or self.stopped.is_set())
            room, self._room = self._room, 0
            return 0 if self.stopped.is_set() else room

    def _fits(self, batch: _Batch, prompt_id: str) -> bool:
        """Return True if a batch may have one more prompt, which it has not."""
        if prompt_id in batch.known or prompt_id in batch.waiting:
            return False
        return len(batch.known) + len(batch.waiting) < self._most

    def _send(self, batch: _Batch) -> _Batch:
        """Add what waits; return the batch that has it: another, where the gateway has closed this one."""
        if not batch.waiting:
            return batch
        try:
            batch.add(self._request.samples)
            return batch
        except (FailedPreconditionError, ResourceExhaustedError) as error:
            if batch.known == batch.waiting.keys():
                # Another would be refused as well.
                raise
            _log.info("groups are added to another batch: %s", error)
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
        """Open a batch, and take its groups until it has ended."""
        try:
            with ExitStack() as leaving:
                opened = self._enter(leaving, step)
                batch.opening.set_result(opened)
                for sample in opened:
                    self.heard = time.monotonic()
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
        """Open a batch, which goes on under every version that is served."""
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
        """Keep a sample; return True if its group is whole, and was taken."""
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
        self.heard = time.monotonic()
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
        """Report rewards, and let the gateway forget what was read."""
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
