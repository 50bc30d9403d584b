"""Whatever instances, gateway and coordinator do: nobody has what another has, and all is finished in the end."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from paceline.internal.v1 import bubble_pb2 as pb
from services.bubbles.config import BubblesConfig
from services.bubbles.ledger import BubbleLedger, is_running
from services.bubbles.plan import RUN_SILENCE, PregenerationPlan, WorkAnswer
from tests.unit.bubbles.hints import hint, named, progress_of, run_status, work_poll

PHASES = (pb.RUN_PHASE_ROLLOUT, pb.RUN_PHASE_UPDATE, pb.RUN_PHASE_APPLYING)
NAMES = ("a", "b", "c")
LEASE_SECONDS = 5.0
STEPS = (1, 2, 3)
Sample = tuple[str, int, str, int]


@dataclass
class Process:
    """An instance as it sees itself: what it runs, by lease, and what it has yet to tell."""

    name: str
    epoch: int
    version: int = 0
    heard: float = 0.0
    coordinator: int = 0
    running: dict[int, int] = field(default_factory=dict)
    ended: list[pb.PregenerationProgress] = field(default_factory=list)


@dataclass(frozen=True)
class Holder:
    """Who was given a sample, under which lease."""

    name: str
    epoch: int
    lease: int


class Bubbles(RuleBasedStateMachine):
    """Two runs, three instances and a coordinator, all of them unreliable."""

    @initialize(mode=st.sampled_from(["pregenerate", "halt", "sleep"]))
    def begin(self, mode: str) -> None:
        self.now = 1000.0
        self.config = BubblesConfig(during_update=mode, lease_seconds=LEASE_SECONDS)  # type: ignore[arg-type]
        self.epochs = itertools.count(1)
        self.statuses = {name: run_status(pb.RUN_PHASE_ROLLOUT, 0, 0) for name in ("run", "other")}
        self.hints: dict[str, dict[int, pb.PutHintRequest]] = {"run": {}, "other": {}}
        self.processes: dict[str, Process] = {}
        self.serial = 0
        self.start_coordinator()

    # The coordinator and the gateway --------------------------------------------------------------------

    @rule()
    def start_coordinator(self) -> None:
        self.serial += 1
        self.epoch = self.serial * 1_000_000
        self.ledger = BubbleLedger(self.config, self.epoch + 1)
        self.plan = PregenerationPlan(self.ledger)
        self.holders: dict[Sample, Holder] = {}
        self.finished: set[Sample] = set()

    @rule()
    def tell(self) -> None:
        """The gateway tells all that it knows, as it does every second."""
        for run_id, status in self.statuses.items():
            useful = [each for step, each in self.hints[run_id].items() if step > status.step]
            missing = self.ledger.set_run(named(status, run_id, [each.hint_id for each in useful]), self.now)
            for each in useful:
                if each.hint_id in missing:
                    self.ledger.put_hint(each, self.now)

    @rule(run_id=st.sampled_from(["run", "other"]), step=st.sampled_from(STEPS))
    def give_hint(self, run_id: str, step: int) -> None:
        groups = {"x": 10.0, "y": 100.0, "z": 95.0}
        self.hints[run_id][step] = hint(groups, step=step, run_id=run_id)

    @rule(
        run_id=st.sampled_from(["run", "other"]),
        phase=st.sampled_from(PHASES),
        samples=st.integers(0, 2),
        data=st.data(),
    )
    def move_run(self, run_id: str, phase: pb.RunPhase, samples: int, data: st.DataObject) -> None:
        old = self.statuses[run_id]
        unfinished = samples if phase == pb.RUN_PHASE_ROLLOUT else 0
        self.statuses[run_id] = run_status(
            phase,
            data.draw(st.integers(old.policy_version, 1)),
            data.draw(st.integers(old.step, 2)),
            unfinished,
            data.draw(st.integers(0, unfinished)),
        )

    @rule(seconds=st.sampled_from([0.5, 3.0, LEASE_SECONDS + 1, RUN_SILENCE + 1]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.ledger.expire(self.now)

    # Instances ------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(NAMES), version=st.integers(0, 1))
    def start_instance(self, name: str, version: int) -> None:
        """Begins, or dies and begins anew."""
        self.processes[name] = Process(name, next(self.epochs), version)

    @rule(name=st.sampled_from(NAMES))
    def die(self, name: str) -> None:
        self.processes.pop(name, None)

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), how=st.sampled_from(["goes on", "finishes", "gives back"]))
    def generate(self, data: st.DataObject, how: str) -> None:
        process = self.processes[data.draw(st.sampled_from(sorted(self.processes)))]
        for lease in list(process.running):
            if data.draw(st.booleans()):
                process.running[lease] += 10
                if how != "goes on":
                    tokens = process.running.pop(lease)
                    end = progress_of(lease, tokens, finished=how == "finishes", returned=how == "gives back")
                    process.ended.append(end)

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), room=st.integers(0, 9), serving=st.booleans(), lost=st.booleans())
    def poll(self, data: st.DataObject, room: int, serving: bool, lost: bool) -> None:
        process = self.processes[data.draw(st.sampled_from(sorted(self.processes)))]
        self.exchange(process, room, serving=serving, lost=lost)

    def exchange(
        self, process: Process, room: int, *, serving: bool = False, lost: bool = False
    ) -> WorkAnswer:
        progress = [progress_of(lease, tokens) for lease, tokens in process.running.items()] + process.ended
        known = process.coordinator == self.epoch
        poll = work_poll(
            process.name, process.epoch, process.version, room, tuple(progress) if known else (), serving
        )
        self.ledger.report(poll, self.now)
        self.note(poll)
        answer = self.plan.answer(poll, self.now)
        assert not (answer.halt and answer.leases)
        assert len(answer.leases) <= room
        for lease in answer.leases:
            self.check_given(process, poll, lease.run_id, lease.step, lease.task.key, lease.task.seed)
            self.holders[(lease.run_id, lease.step, *lease.task.key)] = Holder(
                process.name, process.epoch, lease.number
            )
        if not lost:
            if not known:
                process.running.clear()
            process.coordinator, process.ended = self.epoch, []
            for number in [*answer.revoked, *(process.running if answer.halt else ())]:
                tokens = process.running.pop(number, None)
                if answer.halt and tokens is not None:
                    process.ended.append(progress_of(number, tokens, returned=True))
            process.running.update({lease.number: 0 for lease in answer.leases})
        return answer

    def note(self, poll: pb.PollWorkRequest) -> None:
        """Take in, as an onlooker, what the poll says of who has what."""
        ended = {each.lease: each for each in poll.progress if not is_running(each)}
        named = {each.lease for each in poll.progress}
        for sample, holder in list(self.holders.items()):
            if holder.name == poll.instance_id:
                if holder.lease in ended and ended[holder.lease].finished:
                    self.finished.add(sample)
                if holder.epoch != poll.epoch or holder.lease in ended or holder.lease not in named:
                    del self.holders[sample]
        process = self.processes[poll.instance_id]
        process.heard = self.now

    def check_given(
        self,
        process: Process,
        poll: pb.PollWorkRequest,
        run_id: str,
        step: int,
        key: tuple[str, int],
        seed: int,
    ) -> None:
        told = self.ledger.runs
        status = told[run_id].status
        assert status is not None
        assert not poll.serving
        assert status.policy_version == process.version
        assert status.step < step
        for run in told.values():
            assert run.status is None or run.status.phase != pb.RUN_PHASE_APPLYING
            fresh = self.now - run.heard_at <= RUN_SILENCE
            assert not (fresh and run.status is not None and run.status.waiting)
        if self.config.during_update != "pregenerate":
            assert status.phase == pb.RUN_PHASE_ROLLOUT
            assert any(run.status is not None and run.status.unfinished for run in told.values())
        groups = {group.prompt_id: group for group in self.hints[run_id][step].groups}
        assert groups[key[0]].seeds[key[1]] == seed
        sample = (run_id, step, *key)
        assert sample not in self.finished
        holder = self.holders.get(sample)
        if holder is not None:
            silent = self.ledger.instances[holder.name].seen_at < self.now - LEASE_SECONDS
            lapsed = holder.lease in self.lapsed(holder.name)
            assert silent or lapsed, f"{sample} is with {holder}"

    def lapsed(self, name: str) -> set[int]:
        """Leases that an instance lost by silence."""
        return {number for number, lease in self.ledger.instances[name].leases.items() if not lease.is_valid}

    def teardown(self) -> None:
        """From any state: with one gateway, one coordinator and instances that work, all gets finished."""
        if not hasattr(self, "ledger"):
            return
        for run_id, status in self.statuses.items():
            self.statuses[run_id] = run_status(pb.RUN_PHASE_ROLLOUT, 0, status.step, unfinished=1)
        self.processes = {name: Process(name, next(self.epochs)) for name in ("a", "b")}
        for _ in range(60):
            self.now += 1.0
            self.ledger.expire(self.now)
            self.tell()
            for process in self.processes.values():
                for number, tokens in process.running.items():
                    process.ended.append(progress_of(number, tokens + 10, finished=True))
                process.running.clear()
                self.exchange(process, 2)
        for run_id, status in self.statuses.items():
            steps = sorted(step for step in self.hints[run_id] if step > status.step)
            for step in steps[: self.config.max_ahead]:
                pool = self.ledger.runs[run_id].pools[step]
                assert pool.open == 0, f"{pool.open} of {run_id}/{step} are open"


Bubbles.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestBubbles = Bubbles.TestCase
