"""Knobs in force on an instance: for a whole step, and for each of its samples.

Mode, margin and latch belong to a whole step: if all of its samples are of one run, that run's knobs apply, else
those shared by all runs. Draft cap, drafters and kill switch apply to each sample by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.contracts.knobs import Knobs, Setting, capped, resolved
from services.generation.rollouts.origin import Origin
from services.generation.speculation.drafter import Samples

OriginOf = Callable[[str], Origin | None]
"""Returns the origin of a sample by id; None if it is not of the step that is rolled out."""


@dataclass(frozen=True, slots=True)
class PreparedKnobs:
    """Resolved knobs of a revision: those shared by all runs, and those of runs."""

    revision: int
    shared: Knobs
    runs: dict[str, Knobs]


class ActiveKnobs:
    """Knobs by which the next step works; used by the engine thread, except `prepare`."""

    def __init__(self, base: Knobs, origin_of: OriginOf) -> None:
        """Begin with `base`, the instance's own configuration, at revision 0."""
        self.revision = 0
        self._share(base)
        self.base = base
        self._origin_of = origin_of
        self._runs: dict[str, Knobs] = {}
        # Samples of the last query, and the knobs of each.
        self._samples: Samples = ()
        self._of_samples: list[Knobs] = []

    def prepare(
        self, revision: int, shared: Setting, runs: Mapping[str, Setting], caps: Mapping[str, int]
    ) -> PreparedKnobs:
        """Return knobs resolved, on any thread: for many runs that takes longer than a step should wait.

        Args:
            revision: of the knobs.
            shared: checked settings over the instance's own configuration.
            runs: settings over those, by run.
            caps: draft caps that the ladders of runs have reached, within their knobs' caps.
        """
        knobs = resolved(self.base, [shared])
        own = {}
        for run_id in {*runs, *caps}:
            # The same object where nothing is its own, so that its samples share a mode with others.
            own[run_id] = capped(resolved(knobs, [runs[run_id]] if run_id in runs else []), caps.get(run_id))
        return PreparedKnobs(revision, knobs, own)

    def apply(self, prepared: PreparedKnobs) -> bool:
        """Put knobs in force; return False if later ones are in force already."""
        if prepared.revision <= self.revision:
            return False
        self.revision, self._runs = prepared.revision, prepared.runs
        self._share(prepared.shared)
        self._samples, self._of_samples = (), []
        return True

    @property
    def window(self) -> int:
        """Largest draft cap of any run."""
        return max(each.draft_cap for each in (self.shared, *self._runs.values()))

    def wants(self, drafter: str, samples: Samples) -> Sequence[bool] | bool:
        """Return True if a drafter may propose for all samples, False for none, or one value per sample."""
        knobs = self._common(samples)
        return _wants(knobs, drafter) if knobs else [_wants(each, drafter) for each in self._each(samples)]

    def of_step(self, samples: Samples) -> Knobs:
        """Return the knobs of a whole step with these samples, at least one."""
        # Speculation is off if it is off for all samples; else samples keep their own limits.
        return self._common(samples) or self._mixed[any(each.speculation for each in self._each(samples))]

    def limited(self, samples: Samples) -> Samples:
        """Return the samples with room for as many draft tokens as their own knobs allow."""
        if not self._runs:
            return samples
        limits = [knobs.draft_cap if knobs.speculation else 0 for knobs in self._each(samples)]
        pairs = zip(samples, limits, strict=True)
        return [sample if sample.room <= limit else replace(sample, room=limit) for sample, limit in pairs]

    def _share(self, knobs: Knobs) -> None:
        self.shared = knobs
        # Of steps of several runs, by whether any of them speculates; the same objects in every step.
        self._mixed = [knobs.model_copy(update={"speculation": on}) for on in (False, True)]

    def _common(self, samples: Samples) -> Knobs | None:
        """Return the knobs of all samples, at least one; None if they differ."""
        if not self._runs:
            return self.shared
        first, *others = self._each(samples)
        return first if all(each is first for each in others) else None

    def _each(self, samples: Samples) -> list[Knobs]:
        """Return the knobs of each sample, cached because every drafter asks for the same samples in a step."""
        if self._samples is not samples:
            origins = [self._origin_of(sample.sample_id) for sample in samples]
            self._of_samples = [
                self.shared if each is None else self._runs.get(each.run_id, self.shared) for each in origins
            ]
            self._samples = samples
        return self._of_samples


def _wants(knobs: Knobs, drafter: str) -> bool:
    # Drafters without a knob are always on.
    return knobs.speculation and getattr(knobs.drafters, drafter, True)
