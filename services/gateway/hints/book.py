"""Hints of coming steps, by run and step.

Pure: times are passed in (unix seconds), nothing is sent or stored here.

A hint is kept until its step begins or is passed. A hint for a step that has begun, for one beyond the nearest
`max_steps`, or for which there is no room, is not kept, and that is no error: a missing hint costs idle time at
most, so it must never stop a trainer.
"""

from __future__ import annotations

import enum
import hashlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.internal.v1 import bubble_pb2
from paceline.v1 import rollout_pb2
from services.contracts.seeds import sample_seed
from services.gateway.batches.messages import exactness_of, has_coupled_history


class HintOutcome(enum.StrEnum):
    """Outcome of a hint."""

    KEPT = "kept"
    # Its step has begun.
    LATE = "late"
    # As many nearer steps are hinted as are kept.
    FAR = "far"
    # No room.
    FULL = "full"


def hinted_batch(request: rollout_pb2.HintNextBatchRequest) -> rollout_pb2.SubmitRolloutsRequest:
    """Return the batch that a hint announces, to be checked as one."""
    return rollout_pb2.SubmitRolloutsRequest(
        run_id=request.run_id,
        batch_id="hint",
        step=request.step,
        policy_version=request.policy_version,
        groups=request.groups,
        sampling=request.sampling,
        exactness=request.exactness,
        run_seed=request.run_seed,
    )


@dataclass(slots=True, eq=False)
class Hint:
    """Hint in the form that the coordinator gets.

    `expected` and `limits` are what the trainer says of the response lengths of each group, 0 for nothing;
    `size` is in bytes.
    """

    message: bubble_pb2.PutHintRequest
    expected: list[int]
    limits: list[int]
    samples: int
    size: int

    @property
    def hint_id(self) -> str:
        """Id derived from the content, so that every gateway gives the same hint the same id."""
        return self.message.hint_id

    @property
    def step(self) -> int:
        return self.message.step

    def predict(self, length_of: Callable[[str, str, int, int | None], float]) -> None:
        """Set the expected lengths from (run id, prompt id, trainer's guess, limit) -> tokens."""
        groups = zip(self.message.groups, self.expected, self.limits, strict=True)
        for group, expected, limit in groups:
            run_id, prompt_id = self.message.run_id, group.prompt_id
            group.expected_tokens = length_of(run_id, prompt_id, expected, limit or None)


def make_hint(request: rollout_pb2.HintNextBatchRequest) -> Hint:
    """Return the hint of a valid request. Seeds are those that the samples of the batch will have.

    Samples with a JSON schema are left out: it is compiled for samples that somebody waits for.
    """
    exactness = exactness_of(request.exactness)
    coupled = has_coupled_history(exactness)
    digest = hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
    message = bubble_pb2.PutHintRequest(
        run_id=request.run_id, hint_id=f"{request.step}-{digest[:16]}", step=request.step, exactness=exactness
    )
    expected, limits, samples = [], [], 0
    for group in request.groups:
        sampling = group.sampling if group.HasField("sampling") else request.sampling
        if sampling.json_schema:
            continue
        samples += group.samples
        seeds = (
            sample_seed(request.run_seed, request.step, group.prompt_id, slot, coupled_history=coupled)
            for slot in range(group.samples)
        )
        message.groups.add(
            prompt_id=group.prompt_id,
            prompt_token_ids=group.prompt_token_ids,
            sampling=sampling,
            seeds=seeds,
            # Of the size that it will have.
            expected_tokens=1.0,
        )
        expected.append(group.expected_tokens)
        limits.append(sampling.max_tokens if sampling.HasField("max_tokens") else 0)
    return Hint(message, expected, limits, samples, message.ByteSize())


@dataclass(slots=True, eq=False)
class HintedRun:
    """Run with its last step that began, the policy version of that (None before the first), and its hints."""

    run_id: str
    touched_at: float
    step: int | None = None
    version: int = 0
    hints: dict[int, Hint] = field(default_factory=dict)

    def position(self) -> int:
        """Return the current step of the run.

        Before the first it is just before the nearest hinted one; nothing precedes step 0.
        """
        if self.step is not None:
            return self.step
        return max(0, min(self.hints, default=0) - 1)

    def phase(self, unfinished: int, version: int, *, applying: bool) -> bubble_pb2.RunPhase:
        """Return the phase of the run when `version` is published.

        Once the weights that came after its last step are published the next step may begin any time: that
        counts as rollout.
        """
        if applying:
            return bubble_pb2.RUN_PHASE_APPLYING
        if unfinished or self.step is None or version != self.version:
            return bubble_pb2.RUN_PHASE_ROLLOUT
        return bubble_pb2.RUN_PHASE_UPDATE


class HintBook:
    """Hints of all runs: of at most `max_steps` steps each, and of at most `max_bytes` bytes in all.

    Of more than `max_runs` runs, those are `idle` that were touched longest ago. Of as many runs of single samples
    the latest step is known.
    """

    def __init__(self, max_steps: int, max_bytes: int, max_runs: int = 10_000) -> None:
        self.runs: dict[str, HintedRun] = {}
        self._max_steps = max_steps
        self._max_bytes = max_bytes
        self._max_runs = max_runs
        # Run id -> last step of a run of single samples, the latest last.
        self._single_steps: OrderedDict[str, int] = OrderedDict()

    def put(self, hint: Hint, now: float) -> tuple[HintOutcome, list[int]]:
        """Keep a hint, in place of an earlier one for its step.

        Returns the outcome, and the steps whose hints had to give way.
        """
        run_id = hint.message.run_id
        run = self.runs.get(run_id) or HintedRun(run_id, now)
        if run.step is not None and hint.step <= run.step:
            return HintOutcome.LATE, []
        nearer = sum(step < hint.step for step in run.hints)
        if nearer >= self._max_steps:
            return HintOutcome.FAR, []
        replaced = run.hints.get(hint.step)
        if self.size() - (replaced.size if replaced else 0) + hint.size > self._max_bytes:
            return HintOutcome.FULL, []
        self.runs[run_id] = run
        run.touched_at, run.hints[hint.step] = now, hint
        surplus = sorted(run.hints)[self._max_steps :]
        for step in surplus:
            del run.hints[step]
        return HintOutcome.KEPT, surplus

    def begin(self, run_id: str, step: int, version: int, now: float) -> list[int]:
        """Record that a batch of this step begins; return the steps whose hints are of no use any more."""
        run = self.runs.setdefault(run_id, HintedRun(run_id, now))
        run.step, run.version, run.touched_at = step, version, now
        passed = [each for each in run.hints if each <= step]
        for each in passed:
            del run.hints[each]
        return passed

    def is_hinted(self, run_id: str, step: int) -> bool:
        """Return True if there is a hint for the step."""
        run = self.runs.get(run_id)
        return run is not None and step in run.hints

    def is_first(self, run_id: str, step: int) -> bool:
        """Return True for a single sample that is the first of a step later than those that have begun."""
        run, singles = self.runs.get(run_id), self._single_steps
        last = max(singles.get(run_id, -1), -1 if run is None or run.step is None else run.step)
        if step <= last:
            return False
        singles[run_id] = step
        singles.move_to_end(run_id)
        if len(singles) > self._max_runs:
            singles.popitem(last=False)
        return True

    def idle(self, before: float) -> list[str]:
        """Return the runs without a batch or a hint since then, and those that are too many."""
        surplus = max(0, len(self.runs) - self._max_runs)
        oldest = sorted(self.runs.values(), key=lambda run: run.touched_at) if surplus else self.runs.values()
        return [
            run.run_id for number, run in enumerate(oldest) if number < surplus or run.touched_at < before
        ]

    def forget(self, run_id: str) -> None:
        """Forget a run."""
        self.runs.pop(run_id, None)
        self._single_steps.pop(run_id, None)

    def size(self) -> int:
        """Return the bytes of all hints."""
        return sum(hint.size for run in self.runs.values() for hint in run.hints.values())

    def samples(self) -> int:
        """Return the number of samples in all hints."""
        return sum(hint.samples for run in self.runs.values() for hint in run.hints.values())
