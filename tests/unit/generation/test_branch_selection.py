"""Branch tokens are chosen with those of chains by their survival, and what is chosen is a tree."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.contracts.knobs import Knobs
from services.contracts.modes import MODES
from services.generation.draft_cache.origin import NOWHERE
from services.generation.engine.draft_forms import FORMS
from services.generation.engine.experiments.trees.tree import ROOT, DraftTree
from services.generation.engine.types import EngineSampleState, SampleStep
from services.generation.experiments.trees.planning import (
    ProposedBranches,
    TreeCandidates,
    TreeMode,
    TreeProposals,
)
from services.generation.speculation.drafter import Proposals, TokenDrafter
from services.generation.speculation.planner import KnobDrivenPlanner
from services.generation.speculation.selection import draft_token_counts, survivals
from services.generation.speculation.speculation import Speculation
from tests.support.step_times import KnownStepTime, planner_mode, settled

N, WINDOW, MOST = 4, 3, 4
VOCAB = 100
seeds = st.integers(0, 10**6)
TREES = next(form for form in FORMS if form.name == "trees")


def proposed(seed: int) -> TreeProposals:
    """Chains with random branches, whose tokens are all different."""
    random = np.random.default_rng(seed)
    chances = random.choice([0.0, 0.3, 0.9, 1.0, random.random()], (N, WINDOW))
    parents = np.array([[random.integers(-1, WINDOW + place) for place in range(MOST)] for _ in range(N)])
    tokens = random.permutation(VOCAB)[: WINDOW + MOST].astype(np.int32)
    odds = random.choice([0.0, 0.4, 1.0, random.random()], (N, MOST))
    branches = ProposedBranches(np.tile(tokens[WINDOW:], (N, 1)), odds, parents)
    return TreeProposals(np.tile(tokens[:WINDOW], (N, 1)), chances, branches=branches)


def plain(tokens: int) -> Proposals:
    return Proposals(np.full((N, tokens), 99, np.int32), np.full((N, tokens), 0.5))


def survival_by_hand(made: TreeProposals, room: list[int]) -> list[dict[int, float]]:
    """Survival of each sample's tokens, by place: of the chain first; without what the room has no place for."""
    found = []
    assert made.branches is not None
    for i in range(N):
        own: dict[int, float] = {}
        for place in range(WINDOW + MOST):
            if place < WINDOW:
                parent, chance = place - 1, made.acceptance[i, place]
            else:
                parent, chance = (
                    int(made.branches.parents[i, place - WINDOW]),
                    made.branches.acceptance[i, place - WINDOW],
                )
            reached = chance * (own.get(parent, 0.0) if parent != ROOT else 1.0)
            if reached > 0 and (place >= WINDOW or place < room[i]):
                own[place] = reached
        while any(place >= WINDOW for place in own) and len(own) > max(0, min(room[i], WINDOW)):
            del own[min(own, key=lambda place: (own[place], -place))]
        found.append(own)
    return found


@settings(deadline=None)
@given(seeds, st.lists(st.integers(0, 5), min_size=N, max_size=N), st.floats(0, 0.4), st.integers(1, 12))
def test_the_most_promising_tokens_are_taken_and_are_trees(
    seed: int, room: list[int], price: float, most: int
) -> None:
    made, other = proposed(seed), plain(2)
    rooms = np.array(room, np.int64)
    survival = survivals([other, made], rooms, WINDOW)
    candidates = TreeCandidates.of([other, made], rooms, survival)
    assert candidates is not None
    by_hand = survival_by_hand(made, room)
    for i, own in enumerate(by_hand):
        whole = {place: float(each) for place, each in enumerate(survival[1, i]) if each > 0}
        whole |= {
            WINDOW + place: float(each) for place, each in enumerate(candidates.branches[i]) if each > 0
        }
        assert whole == pytest.approx(own)
    counts = draft_token_counts(N, most)
    found = candidates.search(counts, np.linspace(1.0, 1.1, len(counts)), price)
    if not found.tokens:
        assert not survival.any()
        return
    lengths, expected, taken = candidates.taken(found)
    kept, left = list[float](), list[float]()
    for i, own in enumerate(by_hand):
        if found.picks[i] == 0:
            assert not taken[i].any()
            kept += survival[0, i, : lengths[i]].tolist()
            left += survival[0, i, lengths[i] :].tolist()
            continue
        mine = {*range(lengths[i]), *(WINDOW + np.flatnonzero(taken[i])).tolist()}
        assert made.branches is not None
        for place in mine - {*range(WINDOW)}:
            assert int(made.branches.parents[i, place - WINDOW]) in mine | {ROOT}
        kept += [own[place] for place in mine]
        left += [each for place, each in own.items() if place not in mine]
    assert len(kept) == found.tokens
    assert expected == pytest.approx(sum(kept))
    assert max(left, default=0.0) <= min(kept) * 1.01 + 2.0**-12


@settings(deadline=None)
@given(seeds)
def test_the_planner_puts_branches_behind_chains(seed: int) -> None:
    made = proposed(seed)
    states = [EngineSampleState(f"s{i}", [1], [2], 2 + i, 2) for i in range(N)]
    chosen = planner_mode(WINDOW, kind=TreeMode).choose(states, {"other": plain(1), "suffix": made})
    branches = made.branches
    assert branches is not None
    for sample_id, tokens in chosen.tokens.items():
        if not isinstance(tokens, DraftTree):
            continue
        i, parents = int(sample_id[1:]), tokens.parents
        assert 0 < len(tokens) <= min(WINDOW, states[i].room)
        assert chosen.origins[sample_id] == ("suffix", "suffix")
        # Each token follows what its drafter says.
        places = [*made.tokens[i].tolist(), *branches.tokens[i].tolist()]
        for token, parent in zip(tokens, parents, strict=True):
            place = places.index(token)
            above = place - 1 if place < WINDOW else int(branches.parents[i, place - WINDOW])
            assert (ROOT if parent == ROOT else tokens[parent]) == (ROOT if above == ROOT else places[above])


class _Fixed(TokenDrafter):
    name = "fixed"

    def __init__(self, made: Proposals) -> None:
        self.made = made

    def propose(self, *given: object) -> Proposals:
        return self.made


class _Counted:
    def __init__(self) -> None:
        self.faults: list[str] = []
        self.counts: list[tuple[str, int, int]] = []

    def verified(self, drafter: str, drafted: int, accepted: int, count: int) -> None:
        self.counts += [(drafter, drafted, accepted)] * count

    def fault(self, drafter: str) -> None:
        self.faults.append(drafter)


def speculation_of(branches: ProposedBranches) -> tuple[Speculation, _Counted]:
    made = TreeProposals(np.array([[5, 6]], np.int32), np.array([[0.9, 0.9]]), branches=branches)
    metrics = _Counted()
    planner = KnobDrivenPlanner(
        Knobs(mode="planner", draft_cap=4, margin=0.0),
        KnownStepTime(per_row=1e-5),  # type: ignore[arg-type]
        lambda _: NOWHERE,
        exploration=settled(),
        modes={**MODES, **{name: replace(MODES[name], place=place) for name, place in TREES.modes.items()}},
    )
    return Speculation([_Fixed(made)], planner, VOCAB, metrics), metrics


def test_a_tree_is_planned_and_its_depth_is_what_lengths_are_learned_from() -> None:
    branches = ProposedBranches(np.array([[7, 8]], np.int32), np.array([[0.8, 0.8]]), np.array([[-1, 2]]))
    speculation, metrics = speculation_of(branches)
    learned = []
    speculation.plan.verified = lambda *outcome: learned.append(outcome)  # type: ignore[method-assign]
    state = EngineSampleState("s", [1], [2], 9, 2)
    assert speculation.drafts([state]) == {"s": DraftTree([5, 6, 7, 8], [-1, 0, -1, 2])}
    assert speculation.learn([SampleStep("s", [7, 8, 9], [0.0] * 3, drafted=4, accepted=2)]) == ["fixed"]
    assert metrics.counts == [("fixed", 4, 2)]
    assert learned == [("fixed", 2, 2, 1)]


@pytest.mark.parametrize(
    "branches",
    [
        ProposedBranches(np.array([[7, VOCAB]], np.int32), np.ones((1, 2)), np.array([[-1, 2]])),
        ProposedBranches(np.array([[7, 8]], np.int32), np.full((1, 2), 1.5), np.array([[-1, 2]])),
        ProposedBranches(np.array([[7, 8]], np.int32), np.ones((1, 2)), np.array([[-1, 3]])),
        ProposedBranches(np.array([[7, 8]], np.int32), np.ones((1, 2)), np.array([[-2, 2]])),
        ProposedBranches(np.array([[7]], np.int32), np.ones((1, 2)), np.array([[-1, 2]])),
        ProposedBranches(np.ones((2, 1), np.int32), np.ones((2, 1)), np.full((2, 1), -1)),
    ],
)
def test_invalid_branches_are_a_fault_of_their_drafter(branches: ProposedBranches) -> None:
    speculation, metrics = speculation_of(branches)
    assert not speculation.drafts([EngineSampleState("s", [1], [2], 9, 2)])
    assert metrics.faults == ["fixed"]


def test_twin_branches_are_a_fault_and_the_step_decodes_plainly() -> None:
    """The child of the root that is the chain's first token as well."""
    twin = ProposedBranches(np.array([[5]], np.int32), np.ones((1, 1)), np.array([[-1]]))
    speculation, metrics = speculation_of(twin)
    assert not speculation.drafts([EngineSampleState("s", [1], [2], 9, 2)])
    assert metrics.faults == ["planner"]
