"""Rewards of a group, and the advantages that follow from them. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class GroupScores:
    """Rewards and advantages of a group's samples, as TRL's AsyncGRPOTrainer has them from a worker of its own."""

    rewards: npt.NDArray[np.float64]
    """[samples], summed over the functions; NaN where none of them gave one."""
    advantages: npt.NDArray[np.float64]
    """[samples], in units of the group's standard deviation; 0 where there is no reward."""
    metrics: tuple[dict[str, float], ...]
    """[samples], what the trainer logs of each."""


def score(by_function: Mapping[str, Sequence[float | None]], samples: int) -> GroupScores:
    """Sum up what the reward functions gave, [samples] each; None is no reward.

    ValueError: a function gave another number of rewards; it is named.
    """
    for name, given in by_function.items():
        if len(given) != samples:
            raise ValueError(f"reward function {name} gave {len(given)} rewards for {samples} completions")
    table = np.array(
        [[np.nan if each is None else float(each) for each in given] for given in by_function.values()]
    )
    known = ~np.isnan(table).all(axis=0)
    rewards = np.where(known, np.nansum(table, axis=0), np.nan)
    advantages = np.zeros(samples)
    mean = deviation = float("nan")
    if known.any():
        mean, deviation = float(rewards[known].mean()), float(rewards[known].std())
        # Where all rewards are equal nothing is learned, and nothing is divided by zero.
        advantages[known] = (rewards[known] - mean) / (deviation + 1e-8)
    metrics = tuple(
        {"reward": float(rewards[sample]), "reward_std": deviation}
        | {f"rewards/{name}": float(row[sample]) for name, row in zip(by_function, table, strict=True)}
        for sample in range(samples)
    )
    return GroupScores(rewards, advantages, metrics)
