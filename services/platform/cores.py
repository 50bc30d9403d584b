"""Shares of processor cores, in the notation of taskset and vLLM: `0-2,7` is four cores."""

from __future__ import annotations

import os
from collections.abc import Sequence


def share_cores(cores: Sequence[int], shares: int, index: int) -> tuple[int, ...]:
    """Return one of `shares` equal shares of cores, which overlap only if there are too few cores."""
    each = len(cores) // shares
    if each == 0:
        return (cores[index % len(cores)],)
    return tuple(cores[index * each : (index + 1) * each])


def cpu_list(cores: Sequence[int]) -> str:
    """Return a list of cores in the notation of taskset and vLLM: 0,1,2."""
    return ",".join(map(str, cores))


def parse_cpu_list(text: str) -> tuple[int, ...]:
    """Return the cores that a list such as `0-2,7` names. ValueError if it is none."""
    cores: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            cores += range(int(first), int(last or first) + 1)
    except ValueError:
        cores = []
    if not cores:
        raise ValueError(f"{text!r} is no list of cores")
    return tuple(cores)


def bind_ranks(told: str | None, ranks: int) -> str | None:
    """Return the cores of each rank on a CPU in vLLM's notation, such as 0,1|2,3; None leaves them to vLLM.

    Left to itself vLLM gives a rank a NUMA node, and does not start where there are fewer nodes than ranks.

    Args:
        told: the instance's cores, such as 0-3, or those of each rank; None: all that the process may use. A word
            of vLLM's, such as nobind, is returned as it is.
        ranks: tensor-parallel size.

    Raises:
        ValueError: `told` is none of these.
    """
    if ranks == 1 or (told is not None and ("|" in told or told.isalpha())):
        return told
    cores = parse_cpu_list(told) if told else sorted(os.sched_getaffinity(0))
    return "|".join(cpu_list(share_cores(cores, ranks, rank)) for rank in range(ranks))
