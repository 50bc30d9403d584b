"""Sample seeds: known answers, and that every part of the identity counts."""

import itertools

import pytest

from services.contracts.seeds import sample_seed

MAX = 2**64 - 1


@pytest.mark.parametrize(
    ("identity", "fresh", "history"),
    [
        ((0, 0, "", 0), 0xCF7C5DA01B5BF88A, 0xEB87E67B119E8CB2),
        ((1, 2, "prompt-3", 4), 0x6D15611327718353, 0x03125328D3AD3362),
        ((MAX, MAX, "é", 2**32 - 1), 0xE020090D6794EF7B, 0x7F56FE6AAF040008),
    ],
)
def test_seeds_equal_their_known_answers(identity, fresh, history):
    assert sample_seed(*identity) == fresh
    assert sample_seed(*identity, coupled_history=True) == history


def test_all_parts_of_the_identity_enter():
    identities = list(
        itertools.product((0, 1, 256), (0, 1, 256), ("", "0", "1", "\x01", "a" * 200), (0, 1, 256))
    )
    seeds = {sample_seed(*identity) for identity in identities}
    assert len(seeds) == len(identities)
    assert max(seeds) >= 2**63


def test_coupled_history_leaves_out_the_step_and_nothing_else():
    def seed(run_seed=5, step=1, prompt_id="p", slot=0):
        return sample_seed(run_seed, step, prompt_id, slot, coupled_history=True)

    assert seed() == seed(step=2)
    assert len({seed(), seed(run_seed=6), seed(prompt_id="q"), seed(slot=1)}) == 4


def test_modes_have_no_seed_in_common_even_if_the_bytes_agree():
    """slot | prompt of the one mode can spell step | slot | prompt of the other."""
    spelled = (3).to_bytes(8, "little").decode()
    assert sample_seed(1, 2, "p", 3) != sample_seed(1, 0, spelled + "p", 2, coupled_history=True)


@pytest.mark.parametrize("value", [-1, 2**64])
@pytest.mark.parametrize("field", ["run_seed", "step", "slot"])
@pytest.mark.parametrize("coupled_history", [False, True])
def test_integers_outside_64_bits_are_refused(field, value, coupled_history):
    identity = {"run_seed": 1, "step": 1, "prompt_id": "p", "slot": 1, field: value}
    with pytest.raises(ValueError, match=f"{field} must be in"):
        sample_seed(**identity, coupled_history=coupled_history)
