"""Simulate the rollout times that followers would have with Qwen3-8B on H100s, by its table of step times.

Two inputs are measured on the small subject: the acceptance of each follower's drafts by position and training
step, and the processor seconds of its updates. The step times of the policy and of the head's passes are computed
from data sheets (services/simulator/device_tables.py), and the planner decides the draft lengths. A training step
is simulated with the acceptance of its block of recorded steps, at both ends of the band of step times
(bench/rollout/modelled.py).

The workload is ReSpec's, in its published parts (Figure 14): 8 instances of 16 samples, 4,000 tokens on average, at
most 8,192. With 128 samples an instance steps are compute-bound for longer.

The time of an update on an H100 is its number of operations at a share of the device's matrix-product rate. The
share is the one that the measured update reached on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp
from statistics import fmean, stdev

from bench.learner.following import FROZEN, SYNC, FollowerRecord
from bench.rollout.modelled import DEVICES, H100_8B
from services.contracts.knobs import Knobs
from services.simulator.cluster_simulation import ClusterSimulation
from services.simulator.device_tables import EAGLE3_8B, H100, QWEN3_8B, DeviceTable, decoding_table
from services.simulator.simulation_setup import (
    LogNormalLengths,
    SimulatedSource,
    SimulatedWorkload,
    SimulationSetup,
)

NONE = "none"
"""Name of decoding without a drafter."""
BLOCKS = 3
"""Parts of the run: the acceptance of each is averaged and simulated as one training step."""
_POLICY = DEVICES[H100_8B]
_HEAD = decoding_table("EAGLE-3 8B", EAGLE3_8B, H100)
_INSTANCES, _SAMPLES_OF_A_PROMPT, _MEAN, _SPREAD, _LIMIT = 8, 8, 4000, 0.6, 8192
UPDATE_TOKENS = 262_144
"""Maximum tokens of an update, the learner's default."""


@dataclass(frozen=True, slots=True)
class LearnerReplay:
    """Seconds of a training run's generation on the simulated cluster, and the lengths of its drafts."""

    rollout_seconds: float
    """Mean over the training steps."""
    training_seconds: float
    """Seconds of an update on one H100; 0 without learning."""
    waited_seconds: float
    """Seconds of the update that generation waits for, mean over the training steps."""
    acceptance_length: float
    draft_length: float
    last_rollout_seconds: float
    """Rollout seconds of the last part of the run."""
    slow_rollout_seconds: float
    """Rollout seconds at the pessimistic end of the band; all other figures are figures of the optimistic end."""

    @property
    def seconds(self) -> float:
        """Rollout seconds and the update seconds that generation waits for."""
        return self.rollout_seconds + self.waited_seconds

    @property
    def slow_seconds(self) -> float:
        """Seconds at the pessimistic end of the band, with the same wait."""
        return self.slow_rollout_seconds + self.waited_seconds


def replayed(
    runs: Mapping[str, FollowerRecord], samples: int, depth: int, seconds_of_update: Mapping[str, float]
) -> dict[str, LearnerReplay]:
    """Return the replay of each follower, and of no drafter, with `samples` samples an instance.

    Without a drafter both ends are equal, because such an engine does not wait for the host.
    """
    plain, _, _ = _rollout(samples, depth, None, _POLICY.steps)
    found = {NONE: LearnerReplay(plain, 0.0, 0.0, 1.0, 0.0, plain, plain)}
    for name, run in runs.items():
        each, slow = (
            [_rollout(samples, depth, block, end) for block in blocks(run.by_place)]
            for end in (_POLICY.steps, _POLICY.pessimistic)
        )
        training = seconds_of_update[name]
        # An update that runs during generation and ends before the next one begins costs generation nothing.
        rollout = fmean(seconds for seconds, _, _ in each)
        waited = training if name == SYNC.name else max(0.0, training - rollout)
        found[name] = LearnerReplay(
            rollout,
            training,
            waited,
            fmean(length for _, length, _ in each),
            fmean(n for _, _, n in each),
            each[-1][0],
            fmean(seconds for seconds, _, _ in slow),
        )
    return found


def blocks(by_place: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
    """Return the mean acceptance by position of each part of the run."""
    ends = [len(by_place) * part // BLOCKS for part in range(BLOCKS + 1)]
    cut = [by_place[begin:end] for begin, end in pairwise(ends) if begin < end]
    return [tuple(fmean(places) for places in zip(*block, strict=True)) for block in cut]


def _rollout(
    samples: int, depth: int, acceptance: tuple[float, ...] | None, policy: DeviceTable
) -> tuple[float, float, float]:
    """Return seconds, acceptance length and draft length of a rollout, averaged over two."""
    lengths = LogNormalLengths(_MEAN / exp(_SPREAD**2 / 2), _SPREAD, _LIMIT)
    prompts = _INSTANCES * samples // _SAMPLES_OF_A_PROMPT
    setup = SimulationSetup(
        policy,
        _INSTANCES,
        SimulatedWorkload(lengths, prompts, _SAMPLES_OF_A_PROMPT, 256),
        2,
        Knobs(mode="planner", draft_cap=depth),
        max_running=samples,
        foreseen=False,
    )
    if acceptance is not None:
        setup = replace(setup, sources=(SimulatedSource("eagle3", acceptance, _HEAD),))
    steps = list(ClusterSimulation(setup).run())
    return (
        fmean(step.seconds for step in steps),
        fmean(step.acceptance_length for step in steps),
        fmean(step.draft_length for step in steps),
    )


def operations(policy: float, head: float, depth: int, read: float, learned: float) -> float:
    """Return the operations of an update.

    Args:
        policy: number of the policy's weights, which run forwards once.
        head: number of the head's weights, which run forwards and backwards at every draft position.
        depth: number of draft positions.
        read: tokens, prompts included.
        learned: tokens that the head drafts.
    """
    return 2 * policy * read + 6 * head * depth * learned


def efficiency(run: FollowerRecord, policy: float, head: float, depth: int, rate: float) -> float:
    """Return the share of the machine's operations a second that the measured updates reached."""
    return operations(policy, head, depth, run.read, run.tokens) / sum(run.update_seconds) / rate


def h100_update_seconds(share: float, depth: int, tokens: float = UPDATE_TOKENS) -> float:
    """Return the time of an update with Qwen3-8B on one H100 at the share `share` of its matrix-product rate."""
    work = operations(QWEN3_8B.weights, EAGLE3_8B.weights, depth, tokens, tokens)
    return work / (share * H100.compute)


def update_tokens(interval: int, samples: int) -> float:
    """Return the mean tokens of an update over the training steps: a step's share, at most the learner's limit."""
    return min(UPDATE_TOKENS, _INSTANCES * samples * _MEAN) / interval


def product_rate() -> float:
    """Measure the operations a second of this machine's matrix products in float32, on one core."""
    import torch

    torch.set_num_threads(1)
    left, right = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best = 0.0
    for _ in range(20):
        began = time.process_time()
        torch.mm(left, right)
        best = max(best, 2 * 1024**3 / (time.process_time() - began))
    return best


def against(replays: Sequence[Mapping[str, Mapping[str, float]]], name: str) -> dict[str, float | None]:
    """Return a follower's time divided by a frozen head's and by the time without a drafter, means over seeds.

    A value below 1 means less time. `replays` has the results of `replayed` as plain data, by seed.
    """
    ratios = [each[name]["seconds"] / each[FROZEN.name]["seconds"] for each in replays]
    last = [
        each[name]["last_rollout_seconds"] / each[FROZEN.name]["last_rollout_seconds"] for each in replays
    ]
    return {
        "rollout_time_vs_frozen": fmean(ratios),
        "rollout_time_vs_frozen_spread": stdev(ratios) if len(ratios) > 1 else None,
        "last_rollout_time_vs_frozen": fmean(last),
        "rollout_time_vs_none": fmean(each[name]["seconds"] / each[NONE]["seconds"] for each in replays),
        "slow_rollout_time_vs_none": fmean(
            each[name]["slow_seconds"] / each[NONE]["slow_seconds"] for each in replays
        ),
    }
