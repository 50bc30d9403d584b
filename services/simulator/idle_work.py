"""Pre-generation in the bubbles of a simulated cluster, by the coordinator's own ledger and plan. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Protocol

from paceline.internal.v1 import bubble_pb2 as pb
from services.bubbles.config import BubblesConfig
from services.bubbles.ledger import BubbleLedger, TaskLease
from services.bubbles.plan import PregenerationPlan
from services.simulator.modelled_instance import SimulatedSample
from services.simulator.simulation_setup import Ints

_RUN = "run"
_FRESH = 5.0
"""Seconds after which the gateway repeats its report."""


class RunningSamples(Protocol):
    """Samples that run on an instance."""

    def __contains__(self, sample: SimulatedSample) -> bool: ...

    def remove(self, sample: SimulatedSample) -> None:
        """Take a sample out of the batch; it then knows the tokens that it has generated."""
        ...


class IdleInstance(Protocol):
    """The part of an instance that its work in bubbles needs: the simulator's, or the clock's in bench."""

    name: str
    max_running: int
    steps: int
    waiting: deque[SimulatedSample]

    @property
    def samples(self) -> int:
        """Number of samples that run or wait."""
        ...

    @property
    def batch(self) -> RunningSamples:
        """Samples that run."""
        ...

    def prefill(self, tokens: int) -> None:
        """Compute the KV of `tokens` tokens before the next step."""
        ...

    def generated(self, sample: SimulatedSample, now: float) -> float:
        """Return the response tokens that a sample of this instance has by `now`."""
        ...


class IdleWork:
    """Pre-generation on instances without samples of a step, and the coverage of a step when it begins."""

    def __init__(self, config: BubblesConfig, prompt_tokens: int) -> None:
        self._ledger = BubbleLedger(config)
        self._plan = PregenerationPlan(self._ledger)
        self._coupled, self._poll_steps = config.coupled, config.poll_steps
        self._prompt_tokens = prompt_tokens
        self._status = pb.SetRunRequest(run_id=_RUN)
        self._lengths: dict[int, Ints] = {}
        # Steps of each instance when it polled last, and its tasks by lease.
        self._polled_at: dict[str, int] = {}
        self._held: dict[str, dict[int, tuple[TaskLease, SimulatedSample]]] = {}

    def begin(self, step: int, samples: Mapping[str, int], now: float) -> None:
        """Report to the coordinator that a step is rolled out, with the number of samples of each instance."""
        self._ledger.set_alive(samples)
        self._say(pb.RUN_PHASE_ROLLOUT, step, now)

    def learn(self, now: float) -> None:
        """Report to the coordinator that the last sample has ended."""
        self._say(pb.RUN_PHASE_UPDATE, self._status.step, now)

    def hint(self, step: int, lengths: Ints, expected: Iterable[float], now: float) -> None:
        """Announce a coming step: its true lengths [prompts, samples] and the expected length of each prompt."""
        hint = pb.PutHintRequest(run_id=_RUN, hint_id=f"step-{step}", step=step)
        for prompt, tokens in enumerate(expected):
            seeds = range(lengths.shape[1])
            hint.groups.add(prompt_id=str(prompt), seeds=seeds, expected_tokens=tokens)
        self._lengths = {step: lengths}
        self._status.hint_ids[:] = [hint.hint_id]
        self._ledger.set_run(self._status, now)
        self._ledger.put_hint(hint, now)

    def coverage(self, step: int) -> dict[tuple[int, int], int]:
        """Return the pre-generated tokens of a step by prompt and slot, without samples that have none."""
        return {
            (int(task.group.prompt_id), task.slot): task.covered for task in self._ledger.coverage(_RUN, step)
        }

    def poll(self, instance: IdleInstance, now: float) -> None:
        """Report the running and finished tasks of an instance, and give it more.

        Like a real instance, it polls every `poll_steps` steps and when it is idle.
        """
        if instance.samples and instance.steps - self._polled_at.get(instance.name, 0) < self._poll_steps:
            return
        self._polled_at[instance.name] = instance.steps
        held = self._held.setdefault(instance.name, {})
        gone = {lease for lease, (_, sample) in held.items() if sample.ends}
        progress = [
            _progress(lease, sample.length, finished=True)
            if lease in gone
            else _progress(lease, int(instance.generated(sample, now)))
            for lease, (_, sample) in held.items()
        ]
        for lease in gone:
            del held[lease]
        room = instance.max_running - instance.samples
        prompts = {sample.prompt for _, sample in held.values()}
        for given in self._answered(instance, progress, room, now):
            sample = self._sample(given)
            held[given.number] = given, sample
            instance.waiting.append(sample)
            # Samples of a prompt share its prefix.
            shared = sample.prompt_tokens if sample.prompt in prompts else 0
            instance.prefill(round(sample.context) - shared)
            prompts.add(sample.prompt)

    def stop(self, instance: IdleInstance, now: float) -> None:
        """Let an instance return its tasks with the tokens generated so far."""
        held = self._held.pop(instance.name, {})
        progress = []
        for lease, (_, sample) in held.items():
            if sample in instance.batch:
                instance.batch.remove(sample)
            finished = sample.generated >= sample.length
            progress.append(_progress(lease, int(sample.generated), finished=finished, returned=not finished))
        kept = [each for each in instance.waiting if not each.lease]
        instance.waiting.clear()
        instance.waiting.extend(kept)
        self._answered(instance, progress, 0, now)

    def _say(self, phase: pb.RunPhase, step: int, now: float) -> None:
        rolls = phase == pb.RUN_PHASE_ROLLOUT
        self._status.phase, self._status.step, self._status.policy_version = phase, step, step + 1
        self._status.unfinished = int(rolls)
        self._ledger.set_run(self._status, now)

    def _answered(
        self, instance: IdleInstance, progress: list[pb.PregenerationProgress], room: int, now: float
    ) -> tuple[TaskLease, ...]:
        run = self._ledger.runs.get(_RUN)
        if run is None or now - run.heard_at > _FRESH:
            self._ledger.set_run(self._status, now)
        poll = pb.PollWorkRequest(
            instance_id=instance.name,
            epoch=1,
            policy_version=self._status.policy_version,
            room=max(0, room),
            progress=progress,
        )
        self._ledger.report(poll, now)
        return self._plan.answer(poll, now).leases

    def _sample(self, lease: TaskLease) -> SimulatedSample:
        task = lease.task
        prompt, lengths = int(task.group.prompt_id), self._lengths[lease.step]
        # A draft with other noise is as long as another sample of its prompt.
        slot = (task.slot if self._coupled else task.slot + 1) % lengths.shape[1]
        return SimulatedSample(
            prompt=prompt,
            slot=task.slot,
            prompt_tokens=self._prompt_tokens,
            length=int(lengths[prompt, slot]),
            generated=float(task.tokens),
            lease=lease.number,
        )


def _progress(
    lease: int, tokens: int, *, finished: bool = False, returned: bool = False
) -> pb.PregenerationProgress:
    return pb.PregenerationProgress(lease=lease, tokens=tokens, finished=finished, returned=returned)
