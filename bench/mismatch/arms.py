"""Ways to draft that are counted, as plain data, and the replay of a recorded run under one of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from bench.mismatch.decoding import ReplayedSample, StrictMetrics, Verification, decode
from bench.mismatch.divergences import MOST, as_text
from bench.mismatch.earlier import Tokens
from bench.mismatch.hindsight import HindsightPlanner
from bench.mismatch.records import CountedRun
from paceline import SampleKey
from services.contracts.rollout import RolloutKind, StoredRollout
from services.generation.drafters.reference.drafter import ReferenceDrafter
from services.generation.drafters.suffix.drafter import SuffixDrafter
from services.generation.speculation.drafter import DraftContext, NewRollouts, TokenDrafter
from services.generation.speculation.plan import FixedLengthPlanner
from services.generation.speculation.speculation import Speculation

FLOORS = (0.3, 0.1)
"""An instance's defaults: of a draft's first token, and of a token's survival."""
_NOT_KNOWN = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True)
class Arm:
    """A way to draft: what the drafters of an instance know of a sample."""

    name: str
    about: str
    back: int | None = None
    """Updates between the step and the policy whose response is the sample's reference; None: it has none."""
    second: int | None = None
    """The same of a second reference, in a drafter of its own."""
    suffix: bool = True
    """The suffix index drafts, too."""
    history: bool = True
    """The prompt's samples of earlier steps are in the index."""
    group: bool = True
    """The samples of the prompt that run in this step draft from each other."""
    ahead: bool = True
    """The references of all samples of the prompt are in the index."""
    floors: tuple[float, float] = FLOORS
    """Of the planner."""
    hindsight: bool = False
    """Of a sample's proposals the best is chosen by what comes: no drafter could be."""


@dataclass(frozen=True, slots=True)
class ReplayedRun:
    """A sample of a run as it was replayed: its steps, and the texts that it could have drafted from, by kind."""

    place: int
    key: SampleKey
    response: Sequence[int]
    steps: Sequence[Verification]
    texts: Sequence[str]


class _SecondReference(ReferenceDrafter):
    """A second drafter of the same kind, for another reference of each sample."""

    name = "second"

    def begin(self, context: DraftContext) -> None:
        """Leave the sample's own reference to the first drafter."""


def replay(counted: CountedRun, arm: Arm) -> Iterator[ReplayedRun]:
    """Replay a run's steps in order, all samples of a step at once; those of the first two only teach."""
    responses: dict[str, Sequence[int]] = {}
    plan = HindsightPlanner(MOST, responses) if arm.hindsight else FixedLengthPlanner(MOST, *arm.floors)
    second = _SecondReference()
    speculation = Speculation(_drafters(arm, second), plan, 1 << 20, StrictMetrics())
    for place in range(len(counted.trajectory.steps)):
        samples = [sample_of(counted, arm, place, key) for key in counted.trajectory.steps[place].samples]
        responses |= {sample.context.sample_id: sample.response for sample in samples}
        for sample in samples:
            speculation.begin(sample.context)
        second.add_rollouts(NewRollouts((), _references(counted, arm.second, place, samples)))
        speculation.add_rollouts(NewRollouts(known_at(counted, arm, place)))
        while speculation.idle_work():
            pass
        steps = decode(speculation, samples, counted.trajectory.options.max_tokens)
        if place >= _FIRST:
            for sample in samples:
                texts = [as_text(each) for each in _texts(counted, arm, place, sample.key)]
                yield ReplayedRun(place, sample.key, sample.response, steps[sample.key], texts)


def _drafters(arm: Arm, second: _SecondReference) -> list[TokenDrafter]:
    drafters: list[TokenDrafter] = [ReferenceDrafter()]
    if arm.second is not None:
        drafters.append(second)
    if arm.suffix:
        drafters.append(_suffix(arm))
    return drafters


_FIRST = 2
"""Of the steps before it no policy is two updates old, and no prompt has a history."""


def _suffix(arm: Arm) -> SuffixDrafter:
    from kernels.suffix_index import SuffixIndex

    return SuffixDrafter(SuffixIndex(max_tokens=1_000_000, floor=arm.floors[1]))


def _prompt_name(arm: Arm, key: SampleKey) -> str:
    """Return the name under which a sample's texts are indexed; without a group each has one of its own."""
    return key.prompt_id if arm.group else f"{key.prompt_id}/{key.slot}"


def sample_of(counted: CountedRun, arm: Arm, place: int, key: SampleKey) -> ReplayedSample:
    """Return a sample of the step at `place` and what drafters are told of it."""
    step = counted.trajectory.steps[place]
    sample = step.samples[key]
    prompt = next(group.prompt_token_ids for group in step.groups if group.prompt_id == key.prompt_id)
    reference = _reference(counted, arm.back, place, key)
    context = DraftContext(
        sample_id=f"{place}/{key.prompt_id}/{key.slot}",
        prompt=[int(each) for each in prompt],
        reference=reference,
        prompt_id=_prompt_name(arm, key),
        # Another for each step: the index has only what it is given.
        run_id=f"{place}",
        seed=sample.seed,
        version=place,
        source="own",
    )
    return ReplayedSample(key, context, sample.token_ids.tolist())


def _reference(counted: CountedRun, back: int | None, place: int, key: SampleKey) -> Tokens:
    return list(counted.said[place].get(back, {}).get(key, ())) if back is not None else []


def _references(
    counted: CountedRun, back: int | None, place: int, samples: Sequence[ReplayedSample]
) -> dict[str, StoredRollout]:
    found = {sample.context.sample_id: _reference(counted, back, place, sample.key) for sample in samples}
    return {
        sample_id: _rollout("", "", place, 0, tokens, RolloutKind.HISTORY)
        for sample_id, tokens in found.items()
        if tokens
    }


def known_at(counted: CountedRun, arm: Arm, place: int) -> list[StoredRollout]:
    """Return what the index knows at the beginning of a step, under the names of its samples."""
    steps, found = counted.trajectory.steps, list[StoredRollout]()
    for prompt_id in sorted({key.prompt_id for key in steps[place].samples}):
        keys = [key for key in steps[place].samples if key.prompt_id == prompt_id]
        for name in sorted({_prompt_name(arm, key) for key in keys}):
            if arm.ahead:
                found += _ahead(counted, arm, place, name, keys)
            if arm.history:
                found += _history(counted, place, name, prompt_id)
    return found


def _ahead(
    counted: CountedRun, arm: Arm, place: int, name: str, keys: Sequence[SampleKey]
) -> Iterator[StoredRollout]:
    """Yield the references of a prompt's samples, under a name."""
    samples = counted.trajectory.steps[place].samples
    for key in keys:
        tokens = _reference(counted, arm.back, place, key)
        if arm.back is not None and tokens:
            version, seed = place - arm.back, samples[key].seed
            yield _rollout(f"{place}", name, version, seed, tokens, RolloutKind.PREGENERATED)


def _history(counted: CountedRun, place: int, name: str, prompt_id: str) -> Iterator[StoredRollout]:
    """Yield a prompt's samples of earlier steps, under a name."""
    for earlier, step in enumerate(counted.trajectory.steps[:place]):
        for key, sample in step.samples.items():
            if key.prompt_id == prompt_id:
                tokens = sample.token_ids.tolist()
                yield _rollout(f"{place}", name, earlier, sample.seed, tokens, RolloutKind.HISTORY)


def _texts(counted: CountedRun, arm: Arm, place: int, key: SampleKey) -> list[Tokens]:
    """Return the texts that a sample could draft from, whole: its siblings' too, although they grow beside it."""
    steps, found = counted.trajectory.steps, list[Tokens]()
    found += [
        each for each in (_reference(counted, back, place, key) for back in (arm.back, arm.second)) if each
    ]
    if not arm.suffix:
        return found
    others = [other for other in steps[place].samples if other.prompt_id == key.prompt_id and other != key]
    if arm.ahead:
        found += [_reference(counted, arm.back, place, other) for other in others]
    if arm.group:
        found += [steps[place].samples[other].token_ids.tolist() for other in others]
    if arm.history:
        found += [
            each.token_ids.tolist()
            for earlier in steps[:place]
            for other, each in earlier.samples.items()
            if other.prompt_id == key.prompt_id
        ]
    return [each for each in found if each]


def _rollout(
    run_id: str, prompt_id: str, version: int, seed: int, tokens: Tokens, kind: RolloutKind
) -> StoredRollout:
    return StoredRollout(
        run_id, prompt_id, 0, version, kind, version, seed, np.array(tokens, np.uint32), _NOT_KNOWN, True
    )


ARMS = (
    Arm("own text", "the suffix index of each sample's own text", history=False, group=False),
    Arm("siblings", "and of the samples of its prompt that run beside it", history=False),
    Arm("history, no siblings", "its own text and earlier samples of its prompt", group=False),
    Arm("history", "both: EXACT where nothing is generated ahead"),
    Arm("reference only", "the response of the policy before, same noise; no index", back=1, suffix=False),
    Arm("reference", "the same and the index, all texts in it: EXACT, generated ahead", back=1),
    Arm(
        "reference, no siblings", "the same without texts of other samples of this step", back=1, group=False
    ),
    Arm("reference, no history", "the same without earlier samples of its prompt", back=1, history=False),
    Arm("reference, not indexed", "the references themselves are not in the index", back=1, ahead=False),
    Arm("older reference", "of the policy two updates before: COUPLED_HISTORY", back=2),
    Arm("reference, whole drafts", "drafts are not cut where they are unlikely", back=1, floors=(0.0, 0.0)),
    Arm(
        "reference, in hindsight", "the best of both drafters' proposals in each step", back=1, hindsight=True
    ),
    Arm("history, in hindsight", "the index's proposals, never too long", hindsight=True),
    Arm("two references, in hindsight", "the best of three", back=1, second=2, hindsight=True),
    Arm("two references", "of both policies, each in a drafter of its own", back=1, second=2),
)
