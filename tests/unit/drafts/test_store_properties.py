"""The store beside a model of it that is slow and obvious, after any sequence of operations."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from services.contracts.rollout import RolloutKind, StoredRollout
from services.drafts.store import PROMPT_OVERHEAD, Cause, DraftStore, cost
from tests.unit.drafts.rollouts import make

VERSIONS = 2

Prompt = tuple[str, str]
Name = tuple[str, str, int, RolloutKind, int, int]


@dataclass
class Model:
    """A flat list of rollouts; every question is answered by looking at all of them."""

    budget: int
    rollouts: list[StoredRollout] = field(default_factory=list)
    used: list[Prompt] = field(default_factory=list)
    latest: dict[str, int] = field(default_factory=dict)
    passed: list[StoredRollout] = field(default_factory=list)
    superseded: list[StoredRollout] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(map(cost, self.rollouts)) + PROMPT_OVERHEAD * len({prompt(each) for each in self.rollouts})

    def put(self, new: StoredRollout) -> bool:
        slot = self.slot(new)
        history = sorted(each.version for each in slot if each.kind is RolloutKind.HISTORY)
        pregenerated = [each for each in slot if each.kind is RolloutKind.PREGENERATED]
        if cost(new) + PROMPT_OVERHEAD > self.budget:
            return False
        if new.kind is RolloutKind.HISTORY:
            others = sorted({*history, new.version})
            if new.version not in others[-VERSIONS:]:
                return False
            self.drop(
                [each for each in slot if each.kind is RolloutKind.HISTORY and each.version == new.version]
            )
            self.drop([each for each in pregenerated if each.step <= new.step])
            self.drop([each for each in slot if each.version in others[:-VERSIONS] and each.kind is new.kind])
            self.latest[new.run_id] = max(new.step, self.latest.get(new.run_id, -1))
        else:
            if any(each.step >= new.step for each in slot if each.kind is RolloutKind.HISTORY):
                return False
            if any(each.step > new.step for each in pregenerated):
                return False
            if any(not replaces(new, each) for each in pregenerated if each.fork == new.fork):
                return False
            self.drop([each for each in pregenerated if each.step < new.step or each.fork == new.fork])
        self.rollouts.append(new)
        self.touch(prompt(new))
        self.note()
        if new in self.passed:
            # What is pre-generated of a slot goes together, as the newest of it.
            own = [each for each in self.passed if each in self.slot(new)]
            self.passed = [each for each in self.passed if each not in own] + own
        while self.bytes > self.budget:
            self.drop(self.victims(new))
            self.forget()
        return new in self.rollouts

    def victims(self, new: StoredRollout) -> list[StoredRollout]:
        if self.passed:
            return [each for each in self.passed if each in self.slot(self.passed[0])]
        if self.superseded:
            return self.superseded[:1]
        coldest = [each for each in self.rollouts if prompt(each) == self.used[0]]
        if self.used[0] != prompt(new):
            return coldest
        # Which of them goes is not specified; the comparison below leaves this case out.
        return [each for each in coldest if each is not new][:1]

    def slot(self, new: StoredRollout) -> list[StoredRollout]:
        return [each for each in self.rollouts if (prompt(each), each.slot) == (prompt(new), new.slot)]

    def touch(self, key: Prompt) -> None:
        if any(prompt(each) == key for each in self.rollouts):
            self.used = [each for each in self.used if each != key] + [key]

    def drop(self, gone: list[StoredRollout]) -> None:
        self.rollouts = [each for each in self.rollouts if each not in gone]
        self.passed = [each for each in self.passed if each not in gone]
        self.superseded = [each for each in self.superseded if each not in gone]

    def forget(self) -> None:
        """Prompts and runs of which nothing is left are forgotten."""
        prompts = {prompt(each) for each in self.rollouts}
        self.used = [each for each in self.used if each in prompts]
        self.latest = {run: step for run, step in self.latest.items() if run in {run for run, _ in prompts}}

    def note(self) -> None:
        """Append what has passed or been superseded by now, in the order of step and of version."""
        self.forget()
        for each in sorted(self.rollouts, key=lambda each: each.step):
            gone_by = each.kind is RolloutKind.PREGENERATED and each.step < self.latest.get(each.run_id, -1)
            if gone_by and each not in self.passed:
                self.passed.append(each)
        for each in sorted(self.rollouts, key=lambda each: each.version):
            newer = any(
                other.kind is RolloutKind.HISTORY and other.version > each.version
                for other in self.slot(each)
            )
            if each.kind is RolloutKind.HISTORY and newer and each not in self.superseded:
                self.superseded.append(each)


def prompt(rollout: StoredRollout) -> Prompt:
    return (rollout.run_id, rollout.prompt_id)


def replaces(new: StoredRollout, old: StoredRollout) -> bool:
    """As in the docs: a later step; newer weights unless shorter; more of the same sample."""
    same, n, m = new.seed == old.seed, len(new.tokens), len(old.tokens)
    if new.step != old.step:
        return new.step > old.step
    if new.version > old.version:
        return n >= m or (same and new.finished)
    return same and not old.finished and (n > m or new.finished)


def name(rollout: StoredRollout) -> Name:
    version = rollout.version if rollout.kind is RolloutKind.HISTORY else 0
    return (rollout.run_id, rollout.prompt_id, rollout.slot, rollout.kind, version, rollout.fork)


@st.composite
def rollouts(draw: st.DrawFn) -> StoredRollout:
    step, kind = draw(st.integers(0, 4)), draw(st.sampled_from(RolloutKind))
    return make(
        draw(st.sampled_from("abcd")),
        draw(st.integers(0, 1)),
        kind,
        fork=draw(st.sampled_from([0, 0, 1, 3])) if kind is RolloutKind.PREGENERATED else 0,
        step=step,
        version=draw(st.integers(max(0, step - 1), step)),
        length=draw(st.sampled_from([1, 2, 3, 100, 300])),
        run=draw(st.sampled_from(["run", "rerun"])),
        seed=draw(st.integers(0, 1)),
        finished=draw(st.booleans()),
    )


evictions = st.fixed_dictionaries(
    {},
    optional={
        "run_id": st.sampled_from(["run", "rerun"]),
        "prompt_ids": st.sets(st.sampled_from("abcd"), min_size=1),
        "before_version": st.integers(1, 5),
        "kind": st.sampled_from(RolloutKind),
    },
)
fetches = st.tuples(st.sampled_from(["run", "rerun"]), st.sampled_from("abcd"))
operations = st.lists(st.one_of(rollouts(), rollouts(), rollouts(), fetches, fetches, evictions), max_size=40)


def check_accounts(store: DraftStore) -> None:
    """The accounts are what counting anew gives, and nothing is there twice or over the limits."""
    found = list(store)
    assert store.bytes <= store.budget_bytes
    assert store.prompts == len({prompt(each) for each in found})
    assert store.bytes == sum(map(cost, found)) + PROMPT_OVERHEAD * store.prompts
    assert store.tokens == sum(len(each.tokens) for each in found)
    assert +store.rollouts == {
        kind: count for kind in RolloutKind if (count := sum(each.kind is kind for each in found))
    }
    assert len(set(map(name, found))) == len(found)
    for each in found:
        slot = [other for other in found if (prompt(other), other.slot) == (prompt(each), each.slot)]
        assert sum(other.kind is RolloutKind.HISTORY for other in slot) <= VERSIONS


@settings(max_examples=400)
@given(operations, st.integers(2000, 15_000))
def test_the_store_does_what_its_model_does(sequence: list[object], budget: int) -> None:
    store, model = DraftStore(budget, VERSIONS), Model(budget)
    kept = store.removed.copy()
    for operation in sequence:
        if isinstance(operation, StoredRollout):
            alone = {prompt(each) for each in model.rollouts} <= {prompt(operation)}
            accepted = store.put(operation)
            check_accounts(store)
            if alone and store.removed[Cause.COLD] > kept[Cause.COLD]:
                return  # which rollouts of the only prompt went is not specified
            assert accepted == model.put(operation)
        elif isinstance(operation, tuple):
            fetched = store.fetch(*operation)
            assert {*fetched} == {each for each in model.rollouts if prompt(each) == operation}
            model.touch(operation)
        else:
            assert isinstance(operation, dict)
            gone = [
                each
                for each in model.rollouts
                if operation.get("run_id", each.run_id) == each.run_id
                and each.prompt_id in operation.get("prompt_ids", "abcd")
                and each.version < operation.get("before_version", 9)
                and operation.get("kind", each.kind) is each.kind
            ]
            assert store.evict(**operation) == len(gone)
            model.drop(gone)
        model.forget()
        kept = store.removed.copy()
        check_accounts(store)
        assert {*store} == {*model.rollouts}


@given(operations)
def test_putting_everything_into_a_new_store_gives_the_same_store(sequence: list[object]) -> None:
    """This is how a snapshot is restored; what would be evicted next is the same too."""
    store, twin = DraftStore(1 << 20, VERSIONS), DraftStore(1 << 20, VERSIONS)
    for operation in sequence:
        if isinstance(operation, StoredRollout):
            store.put(operation)
        elif isinstance(operation, tuple):
            store.fetch(*operation)
    assert all(twin.put(each) for each in store)
    assert list(twin) == list(store)
    check_accounts(twin)


@given(st.lists(st.tuples(st.booleans(), st.sampled_from("abcdef")), max_size=60), st.integers(1, 5))
def test_the_prompts_kept_are_those_used_last(uses: list[tuple[bool, str]], room: int) -> None:
    store = DraftStore(room * (cost(make("a")) + PROMPT_OVERHEAD), VERSIONS)
    recent: list[str] = []
    for is_put, letter in uses:
        if is_put:
            store.put(make(letter))
        else:
            store.fetch("run", letter)
        if is_put or letter in recent:
            recent = [*(each for each in recent if each != letter), letter][-room:]
        assert [each.prompt_id for each in store] == recent
