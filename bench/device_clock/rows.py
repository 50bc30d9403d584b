"""Rows of the table: which systems roll out the recorded run on the device's clock, and their figures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean
from typing import Any

from bench.device_clock.cluster import RecordedCluster
from bench.device_clock.recording import MOST_FORKS, ClockedStep, RecordedTexts, TrainerClock, scheduled
from bench.device_clock.stock import TREE_DEPTH, DraftMethod, StockFleet
from bench.report import format_band
from bench.rollout.modelled import ModelledDevice
from bench.rollout.table import WARM_UP, update_of
from services.bubbles.config import BubblesConfig
from services.simulator.device_tables import DeviceTable

INSTANCES = 2
_LONG = 20.0
"""Update time, in plain rollouts, that suffices to generate any step ahead completely."""


@dataclass(frozen=True, slots=True)
class StockRow:
    """Stock vLLM engines. `speculation` is vLLM's speculative_config."""

    name: str
    speculation: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class PacelineRow:
    """Paceline with a part of its pre-generation; by default as it comes."""

    name: str
    bubbles: BubblesConfig | None = field(default_factory=BubblesConfig)
    forks: int = MOST_FORKS
    other_noise: bool = False
    """Generate ahead with noise that the coming samples do not have."""
    whole_step: bool = False
    """Let the trainer take long enough to generate the whole step ahead."""
    one_step_off: bool = False


PLAIN, PACELINE = "plain", "paceline"
_OURS = {"prompt_lookup_min": 3, "prompt_lookup_max": 5}
STOCK_ROWS = (
    StockRow("vllm ngram, 8 drafts", {"method": "ngram", "num_speculative_tokens": 8, **_OURS}),
    StockRow("vllm ngram, 16 drafts", {"method": "ngram", "num_speculative_tokens": 16, **_OURS}),
    StockRow("vllm ngram, 16 drafts, default look-up", {"method": "ngram", "num_speculative_tokens": 16}),
    StockRow("vllm suffix, 8 drafts", {"method": "suffix", "num_speculative_tokens": 8}),
    StockRow("vllm suffix, 16 drafts", {"method": "suffix", "num_speculative_tokens": 16}),
    StockRow("vllm suffix, 24 drafts (default)", {"method": "suffix", "num_speculative_tokens": TREE_DEPTH}),
)
_SLEEP = BubblesConfig(during_update="sleep")
OTHER_NOISE, COUPLED = "paceline, idle time, other noise", "paceline, idle time, no forks"
COLOCATED, ONE_STEP_OFF = "paceline, colocated trainer", "paceline, one step off"
PACELINE_ROWS = (
    PacelineRow("paceline, nothing ahead", None, 0),
    PacelineRow(OTHER_NOISE, forks=0, other_noise=True),
    PacelineRow(COUPLED, forks=0),
    PacelineRow(PACELINE),
    PacelineRow("paceline, whole step, other noise", forks=0, other_noise=True, whole_step=True),
    PacelineRow("paceline, whole step, no forks", forks=0, whole_step=True),
    PacelineRow("paceline, whole step", whole_step=True),
    PacelineRow(f"{COLOCATED}, other noise", _SLEEP, 0, other_noise=True),
    PacelineRow(f"{COLOCATED}, no forks", _SLEEP, 0),
    PacelineRow(COLOCATED, _SLEEP),
    PacelineRow(ONE_STEP_OFF, one_step_off=True),
)
PLAIN_ONE_STEP_OFF, VLLM_ONE_STEP_OFF = "plain, one step off", "vllm's best, one step off"
COLUMNS = (
    "regime",
    "system",
    "tokens a decode step",
    "coverage",
    "acceptance rate",
    "steps of the slowest sample",
    "rollout, modelled s",
    "rollout, of plain",
    "training step, of plain",
    "versions behind",
)


@dataclass(frozen=True, slots=True)
class ClockedRow:
    """Steps of a system in a regime, with the trainer's update in seconds."""

    regime: str
    system: str
    steps: tuple[ClockedStep, ...]
    """Steps at the optimistic end of the device's band."""
    slow: tuple[ClockedStep, ...]
    """The same steps at its pessimistic end."""
    plain: tuple[float, ...]
    """Seconds of plain decoding, by step; the same at both ends."""
    update: float | None
    """None if the trainer's time is not the same as in the other rows."""
    versions_behind: int = 0
    """Versions between the policy that samples and the policy that learns from the samples."""

    @property
    def seconds(self) -> float:
        """Return the mean seconds of a rollout at the optimistic end."""
        return fmean(step.seconds for step in self.steps)

    @property
    def slow_seconds(self) -> float:
        """Return the mean seconds of a rollout at the pessimistic end."""
        return fmean(step.seconds for step in self.slow)

    @property
    def speedup(self) -> float:
        """Return the number of times that rollouts are as fast as plain ones, at the optimistic end."""
        return fmean(self.plain) / self.seconds

    @property
    def low_speedup(self) -> float:
        """Return that number at the pessimistic end."""
        return fmean(self.plain) / self.slow_seconds

    @property
    def band(self) -> str:
        """Return both as text."""
        return format_band(self.speedup, self.low_speedup)

    @property
    def tokens_per_step(self) -> float:
        """Return the mean tokens of a sample in a decode step."""
        return sum(step.tokens for step in self.steps) / sum(step.decode_steps for step in self.steps)

    @property
    def step_speedup(self) -> float | None:
        """Return the number of times that training steps are as fast as plain ones that wait for each update."""
        return self._step_speedup(self.steps)

    def _step_speedup(self, steps: Steps) -> float | None:
        if self.update is None:
            return None
        return (fmean(self.plain) + self.update) / fmean(step.whole for step in steps)

    @property
    def figures(self) -> tuple[float | int | str | None, ...]:
        """Return the columns after the first two; counts and seconds belong to the optimistic end."""
        covered = [step.covered for step in self.steps]
        drafted = sum(step.drafted for step in self.steps)
        return (
            self.tokens_per_step,
            None
            if None in covered
            else sum(each or 0 for each in covered) / sum(step.tokens for step in self.steps),
            sum(step.accepted for step in self.steps) / drafted if drafted else None,
            fmean(step.most_decode_steps for step in self.steps),
            self.seconds,
            self.band,
            format_band(self.step_speedup, self._step_speedup(self.slow)),
            self.versions_behind,
        )


Steps = tuple[ClockedStep, ...]
Ends = tuple[Steps, Steps]
"""Steps at the optimistic and at the pessimistic end of the band."""
Remember = Callable[[str, Callable[[], Iterable[ClockedStep]]], Steps]
"""Returns the steps of a row by the name of its system, and computes them if they are not kept."""


def computed(system: str, steps: Callable[[], Iterable[ClockedStep]]) -> Steps:
    """Compute the steps of a row."""
    return tuple(steps())


@dataclass(frozen=True, slots=True)
class ClockedRegime:
    """A part of the recorded run: its steps, and the same steps with texts to other noise if there are any."""

    name: str
    texts: Sequence[RecordedTexts]
    other_noise: Sequence[RecordedTexts] | None = None


def rows_of(
    regime: ClockedRegime,
    device: ModelledDevice,
    vocabulary: int,
    methods: Mapping[str, Callable[[], DraftMethod]],
    remember: Remember = computed,
) -> Iterator[ClockedRow]:
    """Yield the rows of a regime: plain decoding, vLLM's methods, Paceline, and each one step off.

    Every row but plain decoding is simulated at both ends of the band, where the planner knows the step times of
    that end. Plain engines prepare a step while the device is at the previous one, so they never wait for the host.

    Args:
        regime: the recorded texts.
        device: step times of all systems.
        vocabulary: number of tokens.
        methods: makes the drafter of an engine, by the name of its row; a row without one is left out.
        remember: returns the steps of a row.
    """

    def both(name: str, steps: Callable[[DeviceTable], Iterable[ClockedStep]]) -> Ends:
        found = remember(name, partial(steps, device.steps))
        if device.pessimistic is device.steps:
            return found, found
        return found, remember(f"{name}, pessimistic", partial(steps, device.pessimistic))

    def stock(row: StockRow, table: DeviceTable) -> Iterable[ClockedStep]:
        window = 0 if row.speculation is None else int(row.speculation["num_speculative_tokens"])
        fleet = StockFleet.of(table, vocabulary, INSTANCES, methods.get(row.name), window)
        return map(fleet.rolled_out, regime.texts)

    decoded = remember(PLAIN, partial(stock, StockRow(PLAIN), device.steps))
    plain = tuple(step.seconds for step in decoded)[WARM_UP:]
    update = update_of(fmean(plain))

    def clocked(name: str, ends: Ends, *, one_step_off: bool = False) -> ClockedRow:
        high, low = (tuple(scheduled(end, TrainerClock(update, one_step_off)))[WARM_UP:] for end in ends)
        return ClockedRow(regime.name, name, high, low, plain, update, int(one_step_off))

    yield clocked(PLAIN, (decoded, decoded))
    drafted = {row.name: both(row.name, partial(stock, row)) for row in STOCK_ROWS if row.name in methods}
    for name, ends in drafted.items():
        yield clocked(name, ends)
    for row in PACELINE_ROWS:
        texts = regime.other_noise if row.other_noise else regime.texts
        if texts is not None:
            seconds = _LONG * fmean(plain) if row.whole_step else update
            high, low = (
                end[WARM_UP:] for end in both(row.name, partial(_rolled_out, row, texts, vocabulary, seconds))
            )
            own = None if row.whole_step else update
            yield ClockedRow(regime.name, row.name, high, low, plain, own, int(row.one_step_off))
    yield clocked(PLAIN_ONE_STEP_OFF, (decoded, decoded), one_step_off=True)
    if drafted:
        best = min(drafted.values(), key=lambda ends: sum(step.seconds for step in ends[0][WARM_UP:]))
        yield clocked(VLLM_ONE_STEP_OFF, best, one_step_off=True)


def count_rows(regime: ClockedRegime, methods: Mapping[str, object]) -> int:
    """Return the number of rows of a regime."""
    ours = sum(not row.other_noise or regime.other_noise is not None for row in PACELINE_ROWS)
    return 2 + len(methods) + bool(methods) + ours


def _rolled_out(
    row: PacelineRow, texts: Sequence[RecordedTexts], vocabulary: int, update: float, device: DeviceTable
) -> Iterable[ClockedStep]:
    trainer = TrainerClock(update, row.one_step_off)
    return RecordedCluster(device, vocabulary, INSTANCES, texts, trainer, row.bubbles, row.forks).run()


def best_vllm(rows: Iterable[ClockedRow], regime: str) -> ClockedRow | None:
    """Return the fastest of vLLM's own methods in a regime; None without any."""
    names = {row.name for row in STOCK_ROWS}
    own = [row for row in rows if row.regime == regime and row.system in names]
    return min(own, key=lambda row: row.seconds, default=None)
