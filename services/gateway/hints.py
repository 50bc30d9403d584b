"""What trainers have said of coming steps, and what drafts of a step change about its placement.

Pure: times are passed in (unix seconds), nothing is sent or stored here.

A hint is kept until its step begins or is passed. A hint for a step that has begun, for one beyond the nearest
`max_steps`, or for which there is no room, is not kept, and that is no error: a hint costs idle time at most,
so it must never stop a trainer.
"""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from paceline.internal.v1 import bubble_pb2
from paceline.v1 import rollout_pb2, sample_pb2
from services.gateway.assemble import SeedOf, exactness_of


class Outcome(enum.StrEnum):
    """What became of a hint."""

    KEPT = "kept"
    # Its step has begun.
    LATE = "late"
    # As many nearer steps are hinted as are kept.
    FAR = "far"
    # No room.
    FULL = "full"


@dataclass(frozen=True, slots=True)
class Covered:
    """What there is of a sample before it starts: a draft of so many tokens, which ended by itself or not."""

    tokens: int
    finished: bool = False


# Prompt id and slot -> what there is of the sample.
Coverage = Mapping[tuple[str, int], Covered]


def remaining_work(predicted: float, have: int, covered: Covered | None, draft_cost: float) -> float:
    """What is left of a sample, in tokens that are generated one by one; at least 1.

    `predicted` is its length without a draft and `have` of its tokens exist. A finished draft says how long it
    becomes, an unfinished one how long at least. A drafted token costs `draft_cost` of a generated one.
    """
    if covered is None:
        return max(1.0, predicted - have)
    length = float(covered.tokens) if covered.finished else max(predicted, float(covered.tokens))
    drafted = max(0, covered.tokens - have)
    generated = length - max(have, covered.tokens)
    return max(1.0, draft_cost * drafted + max(0.0, generated))


def as_submission(request: rollout_pb2.HintNextBatchRequest) -> rollout_pb2.SubmitRolloutsRequest:
    """The batch that a hint announces, to be checked as one."""
    return rollout_pb2.SubmitRolloutsRequest(
        run_id=request.run_id,
        batch_id="hint",
        step=request.step,
        policy_version=request.expected_version,
        groups=request.groups,
        sampling=request.sampling,
        exactness=request.exactness,
        run_seed=request.run_seed,
    )


@dataclass(slots=True, eq=False)
class Hint:
    """A hint as the coordinator gets it. `expected` and `limits` are what the trainer says of the response
    lengths of each group, 0 for nothing; `size` is in bytes."""

    message: bubble_pb2.PutHintRequest
    expected: list[int]
    limits: list[int]
    samples: int
    size: int

    @property
    def hint_id(self) -> str:
        """Follows from the content: another gateway gives the same hint the same id."""
        return self.message.hint_id

    @property
    def step(self) -> int:
        return self.message.step

    def predict(self, length_of: Callable[[str, str, int, int | None], float]) -> None:
        """Fills in the lengths expected by (run id, prompt id, trainer's guess, limit) -> tokens."""
        groups = zip(self.message.groups, self.expected, self.limits, strict=True)
        for group, expected, limit in groups:
            run_id, prompt_id = self.message.run_id, group.prompt_id
            group.expected_tokens = length_of(run_id, prompt_id, expected, limit or None)


def make_hint(request: rollout_pb2.HintNextBatchRequest, seed_of: SeedOf) -> Hint:
    """The hint of a valid request. Seeds are those that the samples of the batch will have."""
    exactness = exactness_of(request.exactness)
    coupled = exactness.level == sample_pb2.EXACTNESS_LEVEL_COUPLED_HISTORY
    digest = hashlib.sha256(request.SerializeToString(deterministic=True)).hexdigest()
    message = bubble_pb2.PutHintRequest(
        run_id=request.run_id, hint_id=f"{request.step}-{digest[:16]}", step=request.step, exactness=exactness
    )
    expected, limits = [], []
    for group in request.groups:
        sampling = group.sampling if group.HasField("sampling") else request.sampling
        seeds = (
            seed_of(request.run_seed, request.step, group.prompt_id, slot, coupled)
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
    samples = sum(group.samples for group in request.groups)
    return Hint(message, expected, limits, samples, message.ByteSize())


@dataclass(slots=True, eq=False)
class HintedRun:
    """A run: the step that began last and its policy version (None before the first), and what is hinted."""

    run_id: str
    touched_at: float
    step: int | None = None
    version: int = 0
    hints: dict[int, Hint] = field(default_factory=dict)

    def position(self) -> int:
        """The step that it is at. Before the first it is just before the nearest hinted one; nothing can be
        said to be before step 0."""
        if self.step is not None:
            return self.step
        return max(0, min(self.hints, default=0) - 1)

    def phase(self, unfinished: int, version: int, *, applying: bool) -> bubble_pb2.RunPhase:
        """What is being done for it, when `version` is published. Once the weights that came after its last
        step are published the next step may begin any time: that counts as rollout."""
        if applying:
            return bubble_pb2.RUN_PHASE_APPLYING
        if unfinished or self.step is None or version != self.version:
            return bubble_pb2.RUN_PHASE_ROLLOUT
        return bubble_pb2.RUN_PHASE_UPDATE


class HintBook:
    """All runs that anything is known of, with their hints: of at most `max_steps` steps each, and of at most
    `max_bytes` bytes in all."""

    def __init__(self, max_steps: int, max_bytes: int) -> None:
        self.runs: dict[str, HintedRun] = {}
        self._max_steps = max_steps
        self._max_bytes = max_bytes

    def put(self, hint: Hint, now: float) -> tuple[Outcome, list[int]]:
        """Takes in a hint, in place of an earlier one for its step; also says which steps' hints it has put
        out."""
        run_id = hint.message.run_id
        run = self.runs.get(run_id) or HintedRun(run_id, now)
        if run.step is not None and hint.step <= run.step:
            return Outcome.LATE, []
        nearer = sum(step < hint.step for step in run.hints)
        if nearer >= self._max_steps:
            return Outcome.FAR, []
        replaced = run.hints.get(hint.step)
        if self.size() - (replaced.size if replaced else 0) + hint.size > self._max_bytes:
            return Outcome.FULL, []
        self.runs[run_id] = run
        run.touched_at, run.hints[hint.step] = now, hint
        surplus = sorted(run.hints)[self._max_steps :]
        for step in surplus:
            del run.hints[step]
        return Outcome.KEPT, surplus

    def begin(self, run_id: str, step: int, version: int, now: float) -> list[int]:
        """A batch of this step begins; returns the steps whose hints are of no use any more."""
        run = self.runs.setdefault(run_id, HintedRun(run_id, now))
        run.step, run.version, run.touched_at = step, version, now
        passed = [each for each in run.hints if each <= step]
        for each in passed:
            del run.hints[each]
        return passed

    def is_hinted(self, run_id: str, step: int) -> bool:
        """Whether there is a hint for the step."""
        run = self.runs.get(run_id)
        return run is not None and step in run.hints

    def idle(self, before: float) -> list[str]:
        """The runs that nothing was heard of since then."""
        return [run.run_id for run in self.runs.values() if run.touched_at < before]

    def forget(self, run_id: str) -> None:
        """The run is over."""
        self.runs.pop(run_id, None)

    def size(self) -> int:
        """Bytes of all hints."""
        return sum(hint.size for run in self.runs.values() for hint in run.hints.values())

    def samples(self) -> int:
        """Samples of all hints."""
        return sum(hint.samples for run in self.runs.values() for hint in run.hints.values())
