"""The registry of drafters: drafters of another package, found by its entry points, in the real path of drafts."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from prometheus_client import CollectorRegistry
from pydantic import ValidationError

from paceline.convert.fleet import knobs_from_proto, knobs_to_proto
from services.contracts.drafters import GROUP, OWN, registered, selectable
from services.contracts.errors import InvalidArgument
from services.contracts.knobs import Knobs, check, check_drafters
from services.contracts.rollout import RolloutKind, StoredRollout
from services.generation.build import build_drafts
from services.generation.config import GenerationConfig
from services.generation.drafters.build import FORGIVEN, MAX_SLOW, GuestDrafter, GuestFault
from services.generation.loop.metrics import EngineMetrics
from services.generation.loop.sample_drafts import SampleDrafts
from services.generation.speculation.drafter import DraftContext, NewRollouts, Proposals, TokenDrafter
from tests.unit.generation.scripted import ScriptedEngine, sample_request

TOKENS = 12
MODULE = '''
import sys
import numpy as np
from services.generation.speculation.drafter import DrafterOptions, Proposals, TokenDrafter
from services.platform.observability.metrics import MetricSet, counter


class CountingOptions(DrafterOptions):
    ahead: int = 3
    """Tokens of a proposal."""


class CountingMetrics(MetricSet, prefix="paceline_counting_"):
    proposals = counter("proposals_total", "Proposals.")


class Counting(TokenDrafter):
    """Proposes the positions that follow, which are the tokens of the scripted engine."""

    name = "counting"
    sources = ("ahead",)
    Options, Metrics = CountingOptions, CountingMetrics

    def __init__(self, ahead, metrics):
        self.ahead, self.metrics = ahead, metrics

    @classmethod
    def build(cls, setting):
        return cls(setting.options.ahead, CountingMetrics(setting.registry))

    def made(self, samples):
        begins = np.array([[len(each.response)] for each in samples])
        tokens = begins + np.arange(self.ahead)
        return Proposals(tokens, np.full(tokens.shape, 0.9), ["ahead"] * len(samples))

    def propose(self, samples, window, others):
        self.metrics.proposals.inc(len(samples))
        return self.made(samples)


class Raises(Counting):
    def propose(self, samples, window, others):
        raise RuntimeError("no idea")


class Leaves(Counting):
    def propose(self, samples, window, others):
        sys.exit(3)


class LeavesLater(Counting):
    def propose(self, samples, window, others):
        made = self.made(samples)
        return Proposals(made.tokens, made.acceptance, (sys.exit(3) for _ in samples))


class Nonsense(Counting):
    def propose(self, samples, window, others):
        return Proposals(np.full((len(samples), 2), 10**9), np.ones((len(samples), 2)))


class OneTooMany(Counting):
    def propose(self, samples, window, others):
        return self.made([*samples, *samples])


class Overlong(Counting):
    def propose(self, samples, window, others):
        return Proposals(np.ones((len(samples), window + 1), int), np.ones((len(samples), window + 1)))


class Rewrites(Counting):
    def propose(self, samples, window, others):
        samples[0].response.append(7)


class EverOtherSources(Counting):
    def propose(self, samples, window, others):
        made = self.made(samples)
        return Proposals(made.tokens, made.acceptance, [f"{id(made)}"] * len(samples))


class Wrong(Counting):
    """Proposes tokens that are never sampled, which is allowed."""

    def propose(self, samples, window, others):
        return Proposals(np.full((len(samples), 2), 500), np.ones((len(samples), 2)))


class NoDrafter:
    name = "counting"
'''


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Install a package whose entry point names an object of `MODULE`, or another module."""

    def install(target: str) -> None:
        folder = tmp_path / "site"
        metadata = folder / "counting_drafter-1.0.dist-info"
        metadata.mkdir(parents=True)
        (folder / "counting_drafter.py").write_text(MODULE)
        (folder / "counting_exits.py").write_text("raise SystemExit(1)\n")
        (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: counting-drafter\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[{GROUP}]\ncounting = {target}\n")
        monkeypatch.syspath_prepend(str(folder))
        monkeypatch.delitem(__import__("sys").modules, "counting_drafter", raising=False)

    return install


class Instance:
    """Drafts as an instance builds them, over a scripted engine."""

    def __init__(self, **settings: Any) -> None:
        self.registry = CollectorRegistry()
        self.engine = ScriptedEngine()
        settings = {"drafters": ("counting",), "speculation": "fixed", "sweep_seconds": 0, **settings}
        self.config = GenerationConfig(model="/models/policy", **settings)
        with structlog.testing.capture_logs() as self.log:
            self.drafts: SampleDrafts = build_drafts(
                self.config, self.engine, EngineMetrics(self.registry), lambda _: None
            )
        assert self.drafts.speculation is not None
        self.speculation = self.drafts.speculation

    def run(self) -> list[list[int]]:
        """Generate two samples and return their tokens."""
        tokens: dict[str, list[int]] = {"a": [], "b": []}
        for sample_id in tokens:
            self.engine.add(sample_request(sample_id, max_tokens=TOKENS))
            self.speculation.begin(DraftContext(sample_id, (5,)))
        with structlog.testing.capture_logs() as log:
            while self.engine.requests:
                self.drafts.put(self.engine)  # type: ignore[arg-type]
                for step in self.engine.step():
                    tokens[step.sample_id] += step.token_ids
                    self.drafts.learn([step])
        self.log += log
        return list(tokens.values())

    def value(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    def logged(self, event: str) -> list[Any]:
        return [line for line in self.log if line["event"] == event]


PLAIN = [list(range(TOKENS))] * 2


def test_a_drafter_of_another_package_drafts(installed: Callable[[str], None]) -> None:
    installed("counting_drafter:Counting")
    assert registered()["counting"].own is False
    instance = Instance(drafter_options={"counting": {"ahead": 2}})
    assert instance.run() == PLAIN
    assert instance.value("paceline_counting_proposals_total") > 0
    # Two of three tokens came from drafts of two, each of which was accepted.
    metrics = instance.drafts._metrics
    assert dict(metrics._accepted) == {"ahead": {2: 2 * TOKENS // 3}}
    assert not instance.logged("drafter_fault")


def test_a_drafter_of_another_package_has_a_knob(installed: Callable[[str], None]) -> None:
    installed("counting_drafter:Counting")
    instance = Instance()
    plan: Any = instance.speculation.plan
    assert plan.base.drafters.on("counting")
    setting = check({"drafters": {"counting": False}})
    check_drafters(setting)
    plan.apply(plan.resolve(1, setting, {}, {}))
    assert instance.run() == PLAIN
    assert instance.value("paceline_counting_proposals_total") == 0


@pytest.mark.parametrize(
    ("fault", "logged"),
    [
        ("Raises", "no idea"),
        ("Leaves", "SystemExit"),
        ("LeavesLater", "SystemExit"),
        ("Nonsense", "vocabulary"),
        ("OneTooMany", "4, 3"),
        ("Overlong", "1 to 16"),
        ("Rewrites", "append"),
        ("EverOtherSources", "sources"),
    ],
)
def test_a_faulty_drafter_is_switched_off_and_samples_stay_exact(
    installed: Callable[[str], None], fault: str, logged: str
) -> None:
    installed(f"counting_drafter:{fault}")
    instance = Instance()
    assert instance.run() == PLAIN
    (line,) = instance.logged("drafter_switched_off")
    assert line["drafter"] == "counting"
    assert logged in line["last"]
    assert instance.value("paceline_speculation_drafter_faults_total", drafter="counting") == 3


def test_a_drafter_that_is_always_wrong_costs_steps_and_no_token(installed: Callable[[str], None]) -> None:
    installed("counting_drafter:Wrong")
    instance = Instance()
    assert instance.run() == PLAIN
    assert not instance.logged("drafter_fault")


def test_a_slow_drafter_is_switched_off(installed: Callable[[str], None]) -> None:
    installed("counting_drafter:Counting")
    instance = Instance(drafter_seconds=1e-12)
    assert instance.run() == PLAIN
    (line,) = instance.logged("drafter_switched_off")
    assert "took longer than" in line["last"]


@pytest.mark.parametrize(
    ("target", "options", "fault"),
    [
        ("counting_exits:Counting", {}, "SystemExit"),
        ("counting_drafter:Missing", {}, "Missing"),
        ("counting_drafter:NoDrafter", {}, "TokenDrafter"),
        ("counting_drafter:Counting", {"ahead": "many"}, "ahead"),
        ("counting_drafter:Counting", {"behind": 3}, "behind"),
    ],
)
def test_a_drafter_that_cannot_be_built_is_left_out(
    installed: Callable[[str], None], target: str, options: dict[str, Any], fault: str
) -> None:
    installed(target)
    instance = Instance(drafters=("counting", "reference"), drafter_options={"counting": options})
    (line,) = instance.logged("drafter_left_out")
    assert line["place"] == target
    assert fault in line["fault"]
    assert instance.value("paceline_speculation_drafter_faults_total", drafter="counting") == 1
    assert [each.name for each in instance.speculation.drafters] == ["reference"]
    assert instance.run() == PLAIN


def test_a_name_that_no_package_registers_is_refused(installed: Callable[[str], None]) -> None:
    for name in ("counting", "eagle3", "Suffix"):
        with pytest.raises(ValidationError, match="drafters"):
            GenerationConfig(model="/models/policy", drafters=(name,))
    with pytest.raises(ValidationError, match="allowed are reference, suffix"):
        GenerationConfig(model="/models/policy", drafters=("counting",))
    with pytest.raises(ValidationError, match="counting is not among the drafters"):
        GenerationConfig(model="/models/policy", drafter_options={"counting": {}})
    with pytest.raises(InvalidArgument) as refused:
        check_drafters({"drafters": {"counting": False}})
    assert [each.field for each in refused.value.violations] == ["knobs.drafters.counting"]
    check_drafters({"drafters": {"counting": False}}, ["counting"])
    installed("counting_drafter:Counting")
    assert GenerationConfig(model="/models/policy", drafters=("counting",)).drafters == ("counting",)


def test_a_package_cannot_take_the_name_of_another_drafter(
    installed: Callable[[str], None], tmp_path: Path
) -> None:
    installed(
        "counting_drafter:Counting\nsuffix = counting_drafter:Counting\nBad-name = counting_drafter:Counting"
    )
    assert registered()["suffix"] is OWN["suffix"]
    assert set(registered()) == {*OWN, "counting"}
    assert set(selectable()) == {"counting", *(name for name, each in OWN.items() if not each.model)}


def test_a_knob_of_any_drafter_passes_through_messages() -> None:
    setting = {"drafters": {"suffix": False, "counting": False, "others": True}}
    assert knobs_from_proto(knobs_to_proto(setting)) == setting
    assert check(setting) == setting
    assert Knobs.model_validate(setting).drafters.on("anything")


def test_each_drafter_has_the_name_that_it_is_registered_by() -> None:
    for name, each in OWN.items():
        drafter = each.load()
        assert issubclass(drafter, TokenDrafter)
        assert drafter.name == name


def test_the_page_on_drafters_has_them_all() -> None:
    page = (Path(__file__).parents[3] / "docs/drafters.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|", page, re.MULTILINE)
    assert {name for name, _ in rows} == set(OWN)


class Spy(TokenDrafter):
    """Keeps what it gets, and changes it where it can."""

    name = "spy"
    sequential = True

    def __init__(self) -> None:
        self.times = 0.0
        self.contexts: list[DraftContext] = []

    def begin(self, context: DraftContext) -> None:
        self.contexts.append(context)

    def add_rollouts(self, arrival: NewRollouts) -> None:
        arrival.rollouts[0].tokens[0] = 9

    def carry(self, sample_id: str) -> Any:
        return "text"

    def propose(self, samples: Any, window: int, others: Any) -> Any:
        others["suffix"].tokens[0, 0] = 10**9


def test_a_guest_can_change_nothing_of_the_engine() -> None:
    guest = GuestDrafter("spy", Spy(), 1.0)
    tokens = np.array([1, 2], np.uint32)
    rollout = StoredRollout("r", "p", 0, 1, RolloutKind.HISTORY, 1, 1, tokens, np.zeros(2, np.float32), True)
    with pytest.raises(ValueError, match="read-only"):
        guest.add_rollouts(NewRollouts([rollout]))
    proposed = Proposals(np.ones((1, 1), np.int32), np.ones((1, 1)))
    with pytest.raises(ValueError, match="read-only"):
        guest.propose([], 4, {"suffix": proposed})
    with pytest.raises(GuestFault, match="bytes"):
        guest.carry("a")
    assert (tokens.tolist(), proposed.tokens.tolist()) == ([1, 2], [[1]])
    assert guest.sequential


def test_slow_calls_are_forgiven_after_many_quick_ones() -> None:
    now = [0.0]

    class Slow(TokenDrafter):
        name = "slow"
        takes = 0.0

        def learn(self, sample_id: str, drafted: int, accepted: int) -> None:
            now[0] += self.takes

    slow = Slow()
    guest = GuestDrafter("slow", slow, 1.0, clock=lambda: now[0])
    for _ in range(2):
        slow.takes = 2.0
        for _ in range(MAX_SLOW - 1):
            guest.learn("a", 1, 1)
        slow.takes = 0.0
        for _ in range(FORGIVEN):
            guest.learn("a", 1, 1)
    slow.takes = 2.0
    for _ in range(MAX_SLOW):
        guest.learn("a", 1, 1)
    with pytest.raises(GuestFault, match="longer than"):
        guest.learn("a", 1, 1)
