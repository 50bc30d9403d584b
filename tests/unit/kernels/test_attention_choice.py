"""The choice among attention backends: vLLM's own unless another is clearly faster; the race and what it keeps."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels.short_query_attention.race import MARGIN, AttentionName, AttentionShape, Timing, fastest, race
from services.generation.engine.kernel_choice import keep, recall

VLLM, OURS, FLASHINFER = AttentionName.VLLM, AttentionName.OURS, AttentionName.FLASHINFER


def timings(**seconds):
    return [
        Timing(AttentionName(name), str(case), value)
        for name, values in seconds.items()
        for case, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ({}, VLLM),
        ({"ours": (1.0, 1.0)}, VLLM),
        ({"vllm": (1.0, 1.0)}, VLLM),
        ({"vllm": (1.0, 1.0), "ours": (0.9, 0.9)}, OURS),
        ({"vllm": (1.0, 1.0), "ours": (0.97, 0.97)}, VLLM),
        ({"vllm": (1.0, 1.0), "ours": (0.5, 1.2)}, VLLM),
        ({"vllm": (1.0, 1.0), "ours": (0.5, 1.04)}, OURS),
        ({"vllm": (1.0, 1.0), "ours": (0.5,)}, VLLM),
        ({"vllm": (1.0, 1.0), "ours": (0.5, math.inf)}, VLLM),
        ({"vllm": (1.0, 1.0), "ours": (0.5, math.nan)}, VLLM),
        ({"vllm": (1.0, 1.0), "ours": (0.0, 0.5)}, VLLM),
        ({"vllm": (math.inf, 1.0), "ours": (0.5, 0.5)}, VLLM),
        ({"vllm": (1.0, 1.0), "ours": (0.9, 0.9), "flashinfer": (0.8, 0.8)}, FLASHINFER),
        ({"vllm": (1.0, 10.0), "ours": (0.8, 9.0), "flashinfer": (0.9, 8.0)}, FLASHINFER),
        # A short case counts as much as a long one.
        ({"vllm": (1.0, 100.0), "ours": (0.5, 99.0), "flashinfer": (1.0, 70.0)}, OURS),
    ],
)
def test_vllms_own_stays_until_another_is_clearly_faster(seconds, expected):
    assert fastest(timings(**seconds)) is expected
    assert fastest(reversed(timings(**seconds))) is expected


times = st.lists(st.floats(1e-6, 1.0), min_size=3, max_size=3)


@given(own=times, ours=times, other=times)
def test_what_is_chosen_is_faster_and_nowhere_much_slower(own, ours, other):
    all_times = {VLLM: own, OURS: ours, FLASHINFER: other}
    chosen = all_times[fastest(timings(vllm=own, ours=ours, flashinfer=other))]
    ratios = [a / b for a, b in zip(chosen, own, strict=True)]
    assert max(ratios) <= 1.05 + 1e-9
    mean = math.prod(ratios) ** (1 / 3)
    assert chosen is own or mean < 1 - MARGIN + 1e-9
    # Whoever is never slower than another is never passed over for it.
    if all(a <= 0.9 * min(b, c) for a, b, c in zip(ours, own, other, strict=True)):
        assert chosen is ours


def test_a_backend_that_does_not_run_has_its_error_and_the_others_their_times():
    shape = AttentionShape(heads=2, kv_heads=1, head_size=16, context=24, long=40, requests=3)
    made = []

    def runs(step):
        made.append(step)
        return lambda: None

    def fails(step):
        raise ImportError("no such library")

    found = list(race(torch.device("cpu"), shape, {VLLM: runs, FLASHINFER: fails}))
    assert {(timing.backend, timing.case) for timing in found} == {
        (name, case) for name in (VLLM, FLASHINFER) for case in ("even", "one long", "drafts", "few")
    }
    for timing in found:
        if timing.backend is FLASHINFER:
            assert timing.seconds == math.inf
            assert timing.error == "ImportError: no such library"
        else:
            assert timing.seconds < 10
    assert [step.longest_query for step in made] == [1, 1, 5, 5]
    assert len(made[3].lengths) == shape.requests
    assert made[1].longest == 40
    assert fastest(found) is VLLM


def test_a_race_fits_its_memory():
    shape = AttentionShape(heads=64, kv_heads=8, head_size=128, context=4096, long=1 << 20, requests=1024)
    for most in (1 << 30, 1 << 24, 1 << 10):
        fitting = shape.within(most)
        assert min(fitting.context, fitting.long, fitting.requests) >= 1
        used = (fitting.long + fitting.context * fitting.requests) * 4 * 8 * 128
        assert used <= max(most, 3 * 4 * 8 * 128)
    assert shape.within(1 << 40) == shape


def test_what_was_measured_is_kept_by_what_it_was_measured_for(tmp_path):
    path = tmp_path / "deeper" / "NVIDIA-H200.json"
    assert recall(path, "a") is None
    first, second = timings(vllm=(1.0,), ours=(0.5,)), [Timing(OURS, "0", math.inf, "broken")]
    keep(path, "a", first)
    keep(path, "b", second)
    assert (recall(path, "a"), recall(path, "b"), recall(path, "c")) == (first, second, None)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    path.write_text("{")
    assert recall(path, "a") is None
    keep(path, "a", second)
    assert recall(path, "a") == second
    path.write_text('{"a": [{"backend": "unknown", "case": "0", "seconds": 1}]}')
    assert recall(path, "a") is None


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    keep(tmp_path / "file" / "x.json", "a", [])
    assert recall(tmp_path / "file" / "x.json", "a") is None
