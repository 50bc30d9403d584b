"""Figures of the facade's benchmark: ratios are of one round, and the slowest dialect counts."""

from __future__ import annotations

import pytest

from bench.comparison import Comparison
from bench.facade.__main__ import FacadeWorkload, figures_of
from paceline import SampleKey


def test_the_overhead_is_the_median_of_the_rounds_ratios_of_the_slowest_dialect() -> None:
    seconds = {
        # A machine that is slow for some rounds is slow for all ways.
        "grpc": [1.0, 1.0, 5.0, 1.0, 1.0, 9.0, 1.0],
        "grpc_batch": [9.0] * 7,
        "http_vllm": [1.1, 1.1, 5.5, 1.1, 1.1, 9.9, 1.1],
        "http_sglang": [1.2, 1.2, 6.0, 1.2, 3.0, 10.8, 1.2],
    }
    comparison = Comparison()
    comparison.add("http_vllm", {SampleKey("p", 0): [1, 2, 3]}, {SampleKey("p", 0): [1, 9, 3]})
    found = figures_of(
        FacadeWorkload([[1], [2]], samples=3, max_tokens=4), seconds, dict.fromkeys(seconds, 0.42), comparison
    )
    assert found["overhead_vs_grpc"] == pytest.approx(1.2)
    assert found["ways"]["http_vllm"]["ratio"] == pytest.approx(1.1)
    assert found["ways"]["http_sglang"]["ratio_high"] == pytest.approx(3.0)
    assert found["ways"]["http_vllm"]["facade_ms_per_sample"] == pytest.approx(10)
    assert (found["samples"], found["rounds"]) == (6, 7)
    assert (found["tokens_compared"], found["tokens_that_differ"]) == (2, 1)
