"""Figures of our suffix index beside those of arctic-inference's cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.drafts.acceptance import measure_acceptance
from bench.drafts.indexes import ARCTIC_DEPTHS, arctic_missing
from bench.drafts.speed import measure_speed

RATIOS = (
    "batch_step_speedup_vs_arctic",
    "insert_speedup_vs_arctic",
    "insert_speedup_vs_arctic_bare_tree",
    "bytes_per_token_ratio_vs_arctic",
    "acceptance_ratio_vs_arctic",
)
"""Ours to the better of arctic's; of memory, ours to the smaller."""


def compare(figures: dict[str, Any]) -> dict[str, Any]:
    """Compare our index with the better of arctic's depths; null, with the reason, without arctic."""
    missing = arctic_missing()
    if missing is not None:
        return dict.fromkeys(RATIOS) | {"arctic_missing": missing}

    def best(figure: str, choose: Callable[[list[float]], float]) -> float:
        return choose([figures[f"{figure}_arctic_{depth}"] for depth in ARCTIC_DEPTHS])

    step, insert = "batch_step_microseconds", "insert_tokens_per_second"
    return {
        "batch_step_speedup_vs_arctic": best(step, min) / figures[f"{step}_ours"],
        "insert_speedup_vs_arctic": figures[f"{insert}_ours"] / best(insert, max),
        "insert_speedup_vs_arctic_bare_tree": figures[f"{insert}_ours"]
        / figures[f"{insert}_arctic_bare_tree"],
        "bytes_per_token_ratio_vs_arctic": figures["bytes_per_token_ours"] / best("bytes_per_token", min),
        "acceptance_ratio_vs_arctic": figures["accepted_per_step_ours"] / figures["accepted_per_step_arctic"],
    }


def measure() -> dict[str, Any]:
    """Return all figures of the index."""
    figures = measure_speed() | measure_acceptance()
    return figures | compare(figures)
