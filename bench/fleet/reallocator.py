"""Measure what a turn of the reallocator costs its process in a large fleet: polls, decisions, and evacuations.

Polls go to simulated instances, by real gRPC. Decisions and evacuations are computed from plain data: every
instance answers a listing with the protocol's own message, so that choosing whom to list, parsing the answers,
learning lengths and planning are measured, and the calls are not. `all` lists every instance, which the service
does not do. Seconds are of the processor. Writes runs/bench/fleet.reallocator.json.

    python -m bench.fleet.reallocator [--instances 125,1000] [--samples 256] [--polls 20]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.fleet.control_plane import ControlPlane
from bench.report import numbers, option_parser, show_rows, write
from paceline.internal.v1 import migration_pb2 as pb
from services.platform.redis.connection import Keys, connect
from services.platform.redis.registry import Registry
from services.reallocator.config import ReallocatorConfig
from services.reallocator.members import PolledInstances, Rooflines
from services.reallocator.planning.decision_scope import MOST_LISTED, DecisionScope, in_turn, instance_view
from services.reallocator.planning.learned_costs import LearnedCosts
from services.reallocator.planning.plan import evacuate, plan
from services.reallocator.planning.records import InstanceView, LoadView
from services.reallocator.planning.throughput import Roofline
from services.simulator.device_tables import H100, QWEN3_8B, decoding_table
from services.simulator.sample_moves import table_seconds

FOLDER = Path("runs/bench/fleet")
COLUMNS = ("instances, what", "instances listed", "samples", "MB", "s", "longest, s")
# Decisions that are averaged; the witnesses are listed in the first.
_DECISIONS = 9
# Tokens that every sample gains between two decisions, and most tokens of a response.
_GROWTH, _LIMIT = 64, 32_768
# Mean tokens of a sample, prompt included.
_CONTEXT = 256 + _LIMIT / 4
_MODEL, _HOSTS = "model", 4
# Instances that are polled: more would not answer in time where they share the cores with the poll.
_POLLED = 100


@dataclass(frozen=True, slots=True)
class TurnCost:
    """Instances and samples that were listed, bytes of the answers, and seconds of the processor."""

    instances: int
    samples: int
    bytes: int
    seconds: float


class ListedFleet:
    """Instances as plain data, with samples of all lengths. After every decision the samples are longer."""

    def __init__(self, instances: int, samples: int, fewest: int = 0) -> None:
        """Make instances with `fewest` to `samples` samples each, as in the tail of a step."""
        drawn = random.Random(0)
        self.lengths = {
            f"instance-{n:05d}": [
                drawn.randint(1, _LIMIT // 2) for _ in range(drawn.randint(fewest, samples))
            ]
            for n in range(instances)
        }
        model = partial(table_seconds, decoding_table("8B H100", QWEN3_8B, H100))
        self.roofline = Roofline(model, samples, 0.25)
        # With long contexts every sample prolongs a step, so that many pairs are uneven.
        for count in (1, samples):
            seconds = float(model(count, count, count * _CONTEXT))
            self.roofline.observe(count, seconds, 1.0, _CONTEXT)
        self.config, self.learned = ReallocatorConfig.model_construct(), LearnedCosts()

    def decide(self, scope: DecisionScope | None) -> TurnCost:
        """Return the cost of a decision by the instances that `scope` chooses, or by all."""
        began = time.process_time()
        rules = self.config.rules(self.learned)
        chosen = self.lengths.keys() if scope is None else scope.choose(self._loads(), rules)
        choosing = time.process_time() - began
        answers = [(name, self._answer(name)) for name in chosen]
        began = time.process_time()
        transfers = plan(self._views(answers), rules)
        cost = self._cost(answers, choosing + time.process_time() - began)
        if scope is not None:
            scope.decided({}, transfers)
        for grown in self.lengths.values():
            grown[:] = [min(length + _GROWTH, _LIMIT - 1) for length in grown]
        return cost

    def evacuate(self, most: int) -> TurnCost:
        """Return the cost of planning one round of an evacuation, with at most `most` receivers listed."""
        began = time.process_time()
        donor, *others = self.lengths
        ranked = sorted(others, key=lambda name: (len(self.lengths[name]), name))
        chosen = [donor, *in_turn(ranked, most, 0)]
        choosing = time.process_time() - began
        answers = [(name, self._answer(name)) for name in chosen]
        began = time.process_time()
        leaving, *receivers = self._views(answers)
        evacuate(leaving, receivers, self.config.rules(self.learned))
        return self._cost(answers, choosing + time.process_time() - began)

    def _loads(self) -> list[LoadView]:
        """Return what is known of the instances without listing samples."""
        found = []
        for name, lengths in self.lengths.items():
            curve = self.roofline.curve()
            found.append(LoadView(name, len(lengths), curve, self.roofline.threshold(curve), (_MODEL, 1)))
        return found

    def _answer(self, name: str) -> bytes:
        """Return the listing of an instance as it comes over the network."""
        samples = [
            pb.ListedSample(
                key=f"run-0001/{name}/prompt-{n // 8:06d}/{n % 8}",
                prompt_tokens=256,
                response_tokens=length,
                max_tokens=_LIMIT,
                acceptance=1.5,
                kv_blocks=length // 16 + 17,
            )
            for n, length in enumerate(self.lengths[name])
        ]
        listed = pb.ListSamplesResponse(
            samples=samples, free_capacity=256, max_running=512, free_blocks=1_000_000, policy_version=1
        )
        return listed.SerializeToString()

    def _views(self, answers: Iterable[tuple[str, bytes]]) -> list[InstanceView]:
        """Parse listings, learn from them, and return the views of their instances."""
        lengths_of, views = self.learned.lengths_of(_MODEL), []
        for name, answer in answers:
            listed = pb.ListSamplesResponse.FromString(answer)
            lengths: dict[Hashable, int] = {each.key: each.response_tokens for each in listed.samples}
            lengths_of.learn(name, lengths)
            views.append(
                instance_view(name, _MODEL, listed, self.roofline, lengths_of, gives=True, receives=True)
            )
        return views

    def _cost(self, answers: Collection[tuple[str, bytes]], seconds: float) -> TurnCost:
        samples = sum(len(self.lengths[name]) for name, _ in answers)
        return TurnCost(len(answers), samples, sum(len(answer) for _, answer in answers), seconds)


def decisions(instances: int, samples: int) -> dict[str, list[TurnCost]]:
    """Return the costs of decisions and of rounds of an evacuation in a fleet of this size, by name."""
    fleet, scope = ListedFleet(instances, samples), DecisionScope(_GROWTH, 2)
    full = ListedFleet(instances, samples, samples)
    return {
        "decision": [fleet.decide(scope) for _ in range(_DECISIONS)],
        "decision, all": [ListedFleet(instances, samples).decide(None)],
        "evacuation": [full.evacuate(MOST_LISTED) for _ in range(2)],
        "evacuation, all": [ListedFleet(instances, samples, samples).evacuate(instances)],
    }


async def poll_seconds(instances: int, polls: int) -> float:
    """Return the mean processor seconds of polling this many simulated instances once."""
    with ControlPlane(FOLDER / f"polled-{instances}") as plane:
        await plane.start(range(instances), min(_HOSTS, instances), ())
        config = ReallocatorConfig(redis_url=plane.redis_url)
        redis = connect(config)
        members = PolledInstances(config, Registry(redis, Keys(config.namespace)), Rooflines(config))
        try:
            # The first one opens the connections.
            await members.refresh()
            began = time.process_time()
            for _ in range(polls):
                await members.refresh(float("inf"))
            seconds = (time.process_time() - began) / polls
            answered = sum(member.status is not None for member in members.known.values())
            if answered < instances:
                raise RuntimeError(f"only {answered} of {instances} instances answered the last poll")
        finally:
            await members.close()
            await redis.aclose()
    return seconds


def main() -> None:
    """Measure, show and write."""
    given = arguments()
    rows, figures = list[tuple[str, ...]](), dict[str, Any]()
    for instances in given.instances:
        for name, costs in decisions(instances, given.samples).items():
            rows.append((f"{instances:,}, {name}", *_shown(costs)))
            figures[f"{name.replace(', ', '_')}_seconds_{instances}"] = fmean(each.seconds for each in costs)
    if given.polls:
        seconds = asyncio.run(poll_seconds(_POLLED, given.polls))
        figures["poll_seconds_an_instance"] = seconds / _POLLED
        rows.append((f"{_POLLED:,}, poll", "-", "-", "-", f"{seconds:.3f}", "-"))
    show_rows("fleet.reallocator: processor time of a turn", COLUMNS, rows)
    tables = {"turns": {"columns": COLUMNS, "rows": rows}}
    write("fleet.reallocator", {**figures, "tables": tables, "options": vars(given)})


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = option_parser(__doc__)
    parser.add_argument("--instances", type=numbers(int), default=[125, 1000], help="fleet sizes")
    parser.add_argument("--samples", type=int, default=256, help="most samples of an instance")
    parser.add_argument("--polls", type=int, default=20, help="polls that are averaged; 0: none")
    return parser.parse_args(argv)


def _shown(costs: Sequence[TurnCost]) -> tuple[str, ...]:
    return (
        f"{fmean(each.instances for each in costs):,.0f}",
        f"{fmean(each.samples for each in costs):,.0f}",
        f"{fmean(each.bytes for each in costs) / 1e6:.2f}",
        f"{fmean(each.seconds for each in costs):.3f}",
        f"{max(each.seconds for each in costs):.3f}",
    )


if __name__ == "__main__":
    main()
