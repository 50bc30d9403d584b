"""The record of a batch against a Redis that forgets: every sample is delivered once by its key, and equal."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from paceline.v1 import rollout_pb2
from services.gateway.journal.record import BatchHead, BatchRecord, RecordedBatches, StoredBatch
from services.gateway.journal.writer import used_share

SAMPLES = 6
KEY = ("run", "b")


def make(term: int = 1) -> BatchRecord:
    request = rollout_pb2.SubmitRolloutsRequest(run_id="run", batch_id="b")
    request.groups.add(prompt_id="p", samples=SAMPLES)
    return BatchRecord(request, BatchHead("digest", 0.0, SAMPLES, None), term)


def payload(index: int) -> bytes:
    return b"sample %d" % index


@dataclass
class Store:
    """What Redis has of the batch, as the scripts keep it."""

    done: dict[int, int] = field(default_factory=dict)
    events: dict[int, bytes] = field(default_factory=dict)
    trimmed: int = 0
    acked: int = 0
    exists: bool = True

    def write(self, record: BatchRecord, part: list[int], forgotten: list[int]) -> bool:
        """Write the unwritten samples of `part`; False for a hole."""
        if not self.exists:
            return False
        consistent = len(self.done) == len(record.stored) and len(self.events) + self.trimmed == len(
            self.done
        )
        if not record.repairing and not consistent:
            return False
        for index in forgotten:
            self.done.pop(index, None)
            self.events.pop(index, None)
        for index in part:
            self.done[index] = record.cursor_of(index)
            if record.unwritten[index]:
                self.events[index] = record.unwritten[index]
        if record.repairing:
            self.trimmed = len(self.done) - len(self.events)
        return True

    def look(self) -> StoredBatch:
        return StoredBatch(dict(self.done), frozenset(self.events), self.acked)


class RecordMachine(RuleBasedStateMachine):
    """A gateway, its Redis and a trainer, each of which may forget."""

    @initialize(most_bytes=st.sampled_from([0, 20, 1000]))
    def begin(self, most_bytes: int) -> None:
        self.term, self.store, self.most_bytes = 1, Store(), most_bytes
        self.record, self.cache = make(), RecordedBatches(most_bytes)
        self.running = set(range(SAMPLES))
        self.snapshots = [deepcopy(self.store)]
        self.cursor, self.delivered = 0, list[tuple[int, int]]()
        self.forgot = False

    @rule(which=st.integers(0, SAMPLES - 1))
    def end(self, which: int) -> None:
        if which in self.running:
            self.running.remove(which)
            assert self.record.end(which, payload(which)) > self.cursor

    @rule(most=st.integers(1, 4), answered=st.booleans())
    def write(self, most: int, answered: bool = True) -> None:
        """Write some of what is unwritten; without an answer, the gateway does not learn that it is written."""
        forgotten = list(self.record.forgotten)[:most]
        part = list(self.record.unwritten)[: most - len(forgotten)]
        if not (part or forgotten or self.record.repairing):
            return
        if not self.store.write(self.record, part, forgotten):
            self.look()
        elif answered:
            for index in part:
                if self.record.unwritten[index]:
                    self.cache.keep(KEY, index, self.record.unwritten[index])
            self.record.forgotten.difference_update(forgotten)
            self.record.confirm(part)
        self.snapshots.append(deepcopy(self.store))

    def look(self) -> None:
        self.store.exists = True
        lost = self.record.reconcile(self.store.look(), lambda index: self.cache.kept(KEY, index))
        assert not self.running & set(lost)
        self.running |= set(lost)

    @rule(back=st.integers(0, 10))
    def forget_the_last_writes(self, back: int) -> None:
        del self.snapshots[max(1, len(self.snapshots) - back) :]
        self.store = deepcopy(self.snapshots[-1])
        self.forgot = True

    @rule(what=st.sampled_from(["events", "done", "everything"]))
    def forget_keys(self, what: str) -> None:
        if what == "everything":
            self.store = Store(exists=False)
        else:
            getattr(self.store, what).clear()
        self.snapshots.append(deepcopy(self.store))
        self.forgot = True

    @rule()
    def restart_the_gateway(self) -> None:
        self.term += 1
        self.record, self.cache = make(self.term), RecordedBatches(self.most_bytes)
        self.look()
        self.running = set(range(SAMPLES)) - set(self.record.ended())

    @rule(count=st.integers(1, SAMPLES))
    def deliver(self, count: int) -> None:
        for cursor, index in self.record.after(self.cursor, count):
            found = (
                self.record.unwritten.get(index)
                or self.cache.kept(KEY, index)
                or self.store.events.get(index)
            )
            if found is None:
                self.look()
                return
            assert found == payload(index)
            assert cursor > self.cursor
            self.cursor = cursor
            self.delivered.append((cursor, index))

    @rule()
    def acknowledge(self) -> None:
        indexes = self.record.acknowledge(self.cursor)
        trimmed = [self.store.events.pop(index, None) for index in indexes]
        self.store.trimmed += sum(each is not None for each in trimmed)
        if self.store.exists:
            self.store.acked = self.record.acked
        self.record.trimmed(self.record.acked)
        self.cache.drop(KEY, indexes)
        self.snapshots.append(deepcopy(self.store))

    @invariant()
    def what_is_delivered_is_delivered_once_unless_redis_forgot(self) -> None:
        if hasattr(self, "forgot") and not self.forgot:
            indexes = [index for _, index in self.delivered]
            assert len(indexes) == len(set(indexes))

    @invariant()
    def a_sample_runs_or_has_ended(self) -> None:
        if hasattr(self, "record"):
            assert self.running == set(range(SAMPLES)) - set(self.record.ended())
            assert self.record.unwritten_bytes == sum(map(len, self.record.unwritten.values()))

    def teardown(self) -> None:
        if not hasattr(self, "record"):
            return
        for _ in range(100):
            for index in sorted(self.running):
                self.end(index)
            self.write(4, True)
            self.deliver(SAMPLES)
            if self.record.is_complete and not self.record.after(self.cursor, 1):
                break
        else:
            raise AssertionError("the batch hangs")
        assert {index for _, index in self.delivered} == set(range(SAMPLES))


TestRecordMachine = RecordMachine.TestCase
TestRecordMachine.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_cursors_of_a_later_term_are_higher() -> None:
    early, late = make(7), make(8)
    assert [early.end(index, b"x") for index in range(3)] == [(7 << 32) + n for n in (1, 2, 3)]
    assert late.end(0, b"x") > early.last


def test_a_retried_write_confirms_what_the_first_one_wrote() -> None:
    record, store = make(), Store()
    record.end(0, payload(0))
    assert store.write(record, [0], [])
    assert not store.write(record, [0], []), "the second finds one sample more than it expects"
    assert record.reconcile(store.look(), lambda index: None) == []
    assert (record.unwritten, record.safe, record.finished) == ({}, 1, 1)


def test_a_batch_is_acknowledged_with_its_last_sample_only() -> None:
    record = make()
    last = [record.end(index, payload(index)) for index in range(SAMPLES)][-1]
    record.confirm(range(SAMPLES))
    assert record.acknowledge(last - 1) == list(range(SAMPLES - 1))
    record.trimmed(record.acked)
    assert not record.is_acknowledged
    assert record.request is not None
    assert record.acknowledge(last) == [SAMPLES - 1]
    record.trimmed(record.acked)
    assert record.is_acknowledged
    assert record.request is None


def test_a_cache_keeps_the_last_results_within_its_bytes() -> None:
    cache = RecordedBatches(10)
    for index in range(3):
        cache.keep(KEY, index, b"12345")
    assert [cache.kept(KEY, index) for index in range(3)] == [None, b"12345", b"12345"]
    cache.drop(KEY, (1, 0))
    assert (cache.nbytes, cache.kept(KEY, 1)) == (5, None)
    cache.keep(KEY, 3, b"more than ten")
    assert cache.nbytes == 0


def test_the_used_share_is_that_of_the_fullest_node_with_a_limit() -> None:
    assert used_share({"used_memory": 30, "maxmemory": 40}) == 0.75
    assert used_share({"used_memory": 30, "maxmemory": 0}) == 0.0
    nodes = {"a:1": {"used_memory": 1, "maxmemory": 10}, "b:1": {"used_memory": 9, "maxmemory": 10}}
    assert used_share(nodes) == 0.9
