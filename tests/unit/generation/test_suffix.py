"""The suffix drafter over a plain index: what is in it when, and what the drafter makes of its proposals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.suffix_index import SuffixIndex
from services.contracts.rollout import RolloutKind, StoredRollout
from services.generation.drafters.suffix import SuffixDrafter
from services.generation.engine.types import EngineSampleState
from services.generation.speculation.drafter import (
    DraftContext,
    NewRollouts,
    Proposal,
    Proposals,
    ProposalsByName,
)
from tests.support.proposals import unbatched
from tests.unit.generation.plain_index import PlainIndex
from tests.unit.generation.rollouts import rollout

PROMPT = [1, 2]


class Rig:
    """A drafter over a plain index, and its running samples."""

    def __init__(self, index: Any = None, **settings: Any) -> None:
        self.index = PlainIndex() if index is None else index
        self.lacking: list[int] = []
        self.drafter = SuffixDrafter(self.index, metrics=self, lacked=self.lacking.append, **settings)
        self.prompts: dict[str, list[int]] = {}
        self.indexed_tokens = {"insert": 0, "step": 0}
        self.refused_texts = Counter[str]()
        self.refused_tokens = Counter[str]()

    def indexed(self, phase: str, seconds: float, tokens: int) -> None:
        assert seconds >= 0
        self.indexed_tokens[phase] += tokens

    def refused(self, text: str, texts: int, tokens: int) -> None:
        self.refused_texts[text] += texts
        self.refused_tokens[text] += tokens

    def begin(self, sample_id: str, prompt: Sequence[int] = PROMPT, **fields: Any) -> None:
        self.prompts[sample_id] = list(prompt)
        known = {"prompt_id": "p", "run_id": "r", "seed": sum(map(ord, sample_id)), "version": 1}
        self.drafter.begin(DraftContext(sample_id, prompt, **(known | fields)))

    def proposals(
        self, window: int = 4, others: ProposalsByName = MappingProxyType({}), **responses: list[int]
    ) -> list[Proposal | None]:
        states = [
            EngineSampleState(sample_id, prompt, response, 99, len(prompt) + len(response))
            for sample_id, response in responses.items()
            for prompt in (self.prompts.get(sample_id, PROMPT),)
        ]
        return unbatched(self.drafter.propose(states, window, others), len(states))

    def propose(self, sample_id: str, response: list[int], window: int = 4) -> list[int]:
        (proposal,) = self.proposals(window, **{sample_id: response})
        return [] if proposal is None else list(proposal.tokens)

    def texts(self) -> list[list[int]]:
        return sorted(self.index.texts.values())


def arrival(*rollouts: StoredRollout) -> NewRollouts:
    return NewRollouts(rollouts)


# -- what is in the index -------------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    st.lists(st.lists(st.integers(0, 9), max_size=12), min_size=1, max_size=5),
    st.lists(st.integers(0, 5), max_size=12),
    st.randoms(use_true_random=False),
)
def test_every_token_of_every_sample_is_indexed_once(
    responses: list[list[int]], steps: list[int], random: Any
) -> None:
    rig = Rig()
    ids = [f"s{i}" for i in range(len(responses))]
    for sample_id in ids:
        rig.begin(sample_id)
    lengths = dict.fromkeys(ids, 0)
    for step in steps:
        for sample_id, response in zip(ids, responses, strict=True):
            lengths[sample_id] = min(lengths[sample_id] + random.randint(0, step), len(response))
        # Not every sample can verify a draft in every step.
        shown = [each for each in ids if random.random() < 0.8]
        rig.proposals(**{each: responses[ids.index(each)][: lengths[each]] for each in shown})
    for sample_id, response in zip(ids, responses, strict=True):
        rig.drafter.end(sample_id, response)
    assert rig.texts() == sorted(responses)
    assert rig.indexed_tokens["step"] == sum(map(len, responses))
    assert not rig.index.growing


def test_all_samples_of_a_step_are_one_call() -> None:
    rig = Rig()
    for sample_id in "abc":
        rig.begin(sample_id)
    rig.proposals(a=[1], b=[2], c=[3])
    assert rig.index.batches == [3]


def test_a_sample_whose_reference_serves_it_well_is_indexed_and_gets_nothing() -> None:
    rig = Rig()
    for sample_id in "abc":
        rig.begin(sample_id)
    rig.proposals(a=[5, 6, 7, 8])
    # Of 4 tokens, 3.8 and 2.7 are expected to be accepted.
    acceptance = np.array([[0.98] * 4, [0.85] * 4])
    others = {"reference": Proposals(np.zeros((2, 4), np.int32), acceptance)}
    served, other = rig.proposals(others=others, b=[5, 6], c=[5, 6])
    assert served is None
    assert other is not None
    assert list(other.tokens) == [7, 8]
    assert rig.texts() == [[5, 6], [5, 6], [5, 6, 7, 8]]
    # Without a good reference it gets what it has missed.
    assert rig.propose("b", [5, 6, 7]) == [8]


def test_a_sample_that_the_index_does_not_know_shifts_no_other_one() -> None:
    rig = Rig()
    rig.begin("a")
    rig.begin("c")
    rig.proposals(a=[5, 6, 7, 8])
    acceptance = np.array([[1.0] * 4, [1.0] * 4, [0.1] * 4])
    others = {"reference": Proposals(np.zeros((3, 4), np.int32), acceptance)}
    unknown, served, other = rig.proposals(others=others, b=[5], a=[5, 6, 7, 8], c=[5, 6])
    assert (unknown, served) == (None, None)
    assert other is not None
    assert list(other.tokens) == [7, 8]


def test_a_resumed_sample_brings_its_prefix_along() -> None:
    rig = Rig()
    rig.begin("first")
    rig.begin("second")
    rig.propose("first", [5, 6, 7, 8])
    assert rig.propose("second", [5, 6]) == [7, 8]


def test_samples_of_a_prompt_draft_from_each_other_and_from_no_other_prompt() -> None:
    rig = Rig()
    rig.begin("a")
    rig.begin("b")
    rig.begin("elsewhere", prompt_id="q")
    rig.begin("another-run", run_id="t")
    rig.propose("a", [5, 6, 7])
    assert rig.propose("b", [5, 6]) == [7]
    assert rig.propose("elsewhere", [5, 6]) == []
    assert rig.propose("another-run", [5, 6]) == []
    rig.drafter.end("a", [5, 6, 7, 8])
    assert rig.propose("b", [5, 6]) == [7, 8]


def test_a_prompt_without_a_name_is_known_by_its_tokens() -> None:
    rig = Rig()
    for sample_id, prompt in (("a", [1, 2]), ("b", [1, 2]), ("c", [1, 3])):
        rig.begin(sample_id, prompt, prompt_id="", run_id="")
    rig.propose("a", [5, 6, 7])
    assert rig.propose("b", [5, 6]) == [7]
    assert rig.propose("c", [5, 6]) == []


def test_a_rollout_that_comes_back_from_the_store_is_not_indexed_twice() -> None:
    rig = Rig()
    rig.begin("s", seed=2**64 - 3, version=7)
    rig.begin("sibling")
    rig.drafter.end("s", [5, 6, 7])
    rig.drafter.add_rollouts(arrival(rollout([5, 6, 7], seed=2**64 - 3, version=7)))
    rig.propose("none", [])
    assert rig.texts() == [[], [5, 6, 7]]
    # Of another policy it is another text.
    rig.drafter.add_rollouts(arrival(rollout([5, 6], seed=2**64 - 3, version=6)))
    rig.propose("none", [])
    assert rig.texts() == [[], [5, 6], [5, 6, 7]]
    assert sorted(rig.index.versions.values()) == [1, 6, 7]


def test_a_rollout_of_a_sample_that_is_running_here_changes_nothing() -> None:
    rig = Rig()
    rig.begin("s", seed=3, version=1)
    rig.propose("s", [5, 6])
    rig.drafter.add_rollouts(arrival(rollout([8, 9], seed=3, version=1)))
    rig.propose("s", [5, 6, 7])
    assert rig.texts() == [[5, 6, 7]]


def test_the_same_sample_twice_at_once_is_two_texts() -> None:
    rig = Rig()
    rig.begin("first", seed=3)
    rig.begin("again", seed=3)
    rig.proposals(first=[5, 6], again=[5])
    rig.drafter.end("first", [5, 6])
    rig.drafter.end("again", [5])
    assert rig.texts() == [[5], [5, 6]]


# -- arrivals -------------------------------------------------------------------------------------------------


def test_rollouts_go_in_little_by_little_with_the_steps() -> None:
    rig = Rig(tokens_per_step=10)
    rig.begin("s")
    rig.drafter.add_rollouts(arrival(*[rollout([50 + i] * 4, seed=i) for i in range(100, 107)]))
    seen = []
    for _ in range(4):
        rig.propose("s", [])
        seen.append(rig.indexed_tokens["insert"])
    assert seen == [12, 24, 28, 28]


def test_a_rollout_longer_than_the_budget_goes_in_alone() -> None:
    rig = Rig(tokens_per_step=10)
    rig.begin("s")
    rig.drafter.add_rollouts(arrival(rollout([7] * 100, seed=100), rollout([8], seed=101)))
    rig.propose("s", [])
    assert rig.indexed_tokens["insert"] == 100


def test_while_the_engine_idles_the_rest_goes_in() -> None:
    rig = Rig(tokens_per_step=10)
    rig.begin("s")
    rig.drafter.add_rollouts(arrival(*[rollout([7] * 6, seed=i) for i in range(5)]))
    more = [rig.drafter.idle_work() for _ in range(3)]
    assert more == [True, True, False]
    assert rig.indexed_tokens["insert"] == 30
    assert not rig.drafter.idle_work()


def test_what_is_there_already_costs_none_of_the_budget() -> None:
    rig = Rig(tokens_per_step=10)
    rig.begin("s")
    known = [rollout([7] * 6, seed=i) for i in range(5)]
    rig.drafter.add_rollouts(arrival(*known))
    while rig.drafter.idle_work():
        pass
    rig.drafter.add_rollouts(arrival(*known, rollout([8], seed=90)))
    assert not rig.drafter.idle_work()
    assert rig.indexed_tokens["insert"] == 31


def test_rollouts_that_come_before_their_prompt_wait_for_it() -> None:
    rig = Rig()
    rig.drafter.add_rollouts(arrival(rollout([5, 6, 7], seed=90), rollout([5, 6, 8], seed=91, prompt_id="q")))
    assert not rig.drafter.idle_work()
    assert rig.texts() == []
    rig.begin("s")
    assert rig.propose("s", [5, 6]) == [7]
    assert rig.texts() == [[5, 6], [5, 6, 7]]
    # When the last sample of a prompt is over, what comes for it waits for the next.
    rig.drafter.end("s", [5, 6])
    rig.drafter.add_rollouts(arrival(rollout([9], seed=92)))
    rig.drafter.idle_work()
    assert len(rig.texts()) == 2
    rig.begin("next")
    rig.drafter.idle_work()
    assert [9] in rig.texts()


def test_another_attempt_of_a_sample_takes_nothing_out_of_the_index() -> None:
    rig = Rig()
    rig.begin("s", seed=3)
    rig.drafter.end("s", [5, 6, 7])
    rig.begin("again", seed=3)
    assert rig.propose("again", [5, 6]) == [7]
    rig.drafter.end("again", [5, 6, 9])
    assert rig.texts() == [[5, 6, 7], [5, 6, 9]]


def test_a_rollout_that_arrives_is_drafted_from() -> None:
    rig = Rig()
    rig.begin("s")
    assert rig.propose("s", [5]) == []
    rig.drafter.add_rollouts(arrival(rollout([4, 5, 6, 7], seed=99, kind=RolloutKind.PREGENERATED)))
    assert rig.propose("s", [5, 4, 5]) == [6, 7]


def test_of_rollouts_without_end_the_oldest_are_left_out() -> None:
    rig = Rig(capacity=10)
    rig.begin("s")
    rig.begin("t", prompt_id="q")
    rig.drafter.add_rollouts(arrival(rollout([1] * 6), rollout([2] * 6, prompt_id="q")))
    while rig.drafter.idle_work():
        pass
    assert rig.texts() == [[], [], [2] * 6]
    assert (rig.refused_texts, rig.refused_tokens) == ({"rollout": 1}, {"rollout": 6})


def test_what_has_no_room_is_counted_and_the_samples_of_a_step_are_reported() -> None:
    rig = Rig(PlainIndex(most_tokens=5))
    rig.begin("long", prompt=[1] * 6)
    rig.begin("s")
    assert (rig.refused_texts, rig.refused_tokens) == ({"sample": 1}, {"sample": 6})
    rig.drafter.add_rollouts(arrival(rollout([7] * 6, seed=90)))
    rig.proposals(long=[4, 5], s=[4, 5])
    assert rig.refused_tokens == {"sample": 6, "rollout": 6}
    assert rig.lacking == [1]
    rig.proposals(long=[4, 5, 6], s=[4, 5, 6, 7, 8, 9])
    assert rig.lacking == [1, 2]
    assert rig.refused_tokens == {"sample": 6, "rollout": 6, "halted": 4}
    rig.proposals(s=[4, 5, 6, 7, 8, 9, 10])
    rig.drafter.end("s", [4, 5, 6, 7, 8, 9, 10, 11])
    rig.drafter.end("long", [4, 5, 6])
    assert rig.lacking == [1, 2, 1]
    assert rig.refused_texts == {"sample": 1, "rollout": 1, "halted": 1}
    assert rig.refused_tokens == {"sample": 9, "rollout": 6, "halted": 6}
    assert rig.indexed_tokens == {"insert": 0, "step": 2}
    rig.begin("next")
    rig.proposals(next=[4])
    assert rig.lacking == [1, 2, 1], "it has room"


def test_what_does_not_fit_costs_only_itself() -> None:
    rig = Rig(PlainIndex(most_tokens=5))
    rig.begin("long", prompt=[1] * 6)
    rig.begin("s")
    rig.drafter.add_rollouts(arrival(rollout([7] * 6, seed=90), rollout([4, 5, 6], seed=91)))
    assert rig.proposals(long=[4, 5], s=[4, 5])[0] is None
    assert rig.propose("s", [4, 5]) == [6]
    rig.drafter.end("long", [1])


# -- predictions ----------------------------------------------------------------------------------------------


def test_an_unknown_sample_gets_nothing_and_an_ended_one_is_forgotten() -> None:
    rig = Rig()
    rig.begin("s")
    proposals = rig.proposals(unknown=[1], s=[5, 5, 5], stranger=[2])
    assert [proposal is not None for proposal in proposals] == [False, True, False]
    rig.drafter.end("s", [5, 5, 5])
    rig.drafter.end("s", [5, 5, 5])
    assert rig.propose("s", [5, 5, 5]) == []


def test_a_rarer_continuation_promises_less() -> None:
    rig = Rig()
    rig.begin("s")
    certain, doubtful = [30, 31, 32], [40, 41]
    rig.drafter.add_rollouts(
        arrival(rollout(certain, seed=90), *[rollout([*doubtful, 50 + i], seed=91 + i) for i in range(4)])
    )
    (sure,) = rig.proposals(s=[30, 31])
    (unsure,) = rig.proposals(s=[30, 31, 40, 41])
    assert sure is not None
    assert unsure is not None
    assert sure.acceptance[0] > 2 * unsure.acceptance[0]


def test_predictions_are_the_estimates_of_the_index() -> None:
    rig = Rig()
    rig.begin("s")
    rig.drafter.add_rollouts(arrival(*[rollout([10, 11, 20 + i // 3, 30], seed=90 + i) for i in range(4)]))
    (proposal,) = rig.proposals(s=[10, 11])
    assert proposal is not None
    assert (list(proposal.tokens), list(proposal.acceptance)) == ([20, 30], [0.75, 1.0])


def test_over_the_real_index_a_group_drafts_from_itself_and_from_what_arrives() -> None:
    text = [7 * i % 101 for i in range(80)]
    rig = Rig(SuffixIndex(max_tokens=10_000))
    for sample_id in "abc":
        rig.begin(sample_id)
    rig.drafter.add_rollouts(arrival(rollout(text[:60], seed=90), rollout([5] * 30, seed=91, prompt_id="q")))
    assert rig.propose("a", text[:20], window=8) == text[20:28]
    rig.drafter.end("b", text)
    assert rig.propose("a", text[:62], window=8) == text[62:70]
    # A sample that goes its own way is not led back.
    assert rig.propose("c", [200, 201, 202], window=8) == []
    assert rig.drafter._index.has(("r", "p"), (90, 1))
    assert not rig.drafter._index.has(("r", "q"), (91, 1))
