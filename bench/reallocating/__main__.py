"""Cost of a reallocator's decision in a large fleet: whose samples it lists, their bytes, and its processor time.

Instances are plain data: each answers a listing with as many samples as it has, in the protocol's own form. The
time is that of the one process that decides: choosing whom to list, parsing the answers, learning lengths, and
planning. Calls to instances are not in it. Writes runs/bench/reallocating.json.

    python -m bench.reallocating [--instances 125,1000] [--samples 256]
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from statistics import fmean

from bench.report import show_rows, write
from paceline.internal.v1 import migration_pb2 as pb
from services.reallocator.config import ReallocatorConfig
from services.reallocator.planning.decision_scope import ListingChoice
from services.reallocator.planning.instance_view import instance_view
from services.reallocator.planning.learned_costs import LearnedCosts
from services.reallocator.planning.plan import plan
from services.reallocator.planning.records import LoadView
from services.reallocator.planning.throughput import Roofline
from services.simulator.device_tables import H100, QWEN3_8B, decoding_table
from services.simulator.sample_moves import TableStepTime

_DECISIONS, _GROWTH, _LIMIT = 9, 64, 16384
"""Decisions that are averaged, the first of which lists the instances that lengths are learned from."""
_MODEL = "model"


@dataclass(frozen=True, slots=True)
class DecisionCost:
    """Cost of a decision: instances and samples that are listed, bytes of the answers, processor seconds."""

    instances: int
    samples: int
    bytes: int
    seconds: float


class ListedFleet:
    """Instances with samples of all lengths; every decision finds them longer."""

    def __init__(self, instances: int, samples: int, seed: int = 0) -> None:
        drawn = random.Random(seed)
        # In the tail of a step some are nearly empty and others still full.
        counts = [drawn.randint(0, samples) for _ in range(instances)]
        self.lengths = {
            f"instance-{n:05d}": [drawn.randint(1, _LIMIT // 2) for _ in range(count)]
            for n, count in enumerate(counts)
        }
        self.roofline = Roofline(TableStepTime(decoding_table("8B H100", QWEN3_8B, H100)), samples, 0.25)
        self.config, self.learned = ReallocatorConfig.model_construct(), LearnedCosts()

    def loads(self) -> list[LoadView]:
        """Return what is known of the instances without listing samples."""
        found = []
        for name, lengths in self.lengths.items():
            curve = self.roofline.curve()
            found.append(LoadView(name, len(lengths), curve, self.roofline.threshold(curve), (_MODEL, 1)))
        return found

    def answer(self, name: str) -> bytes:
        """Return an instance's listing as it comes over the network."""
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
            samples=samples, free_capacity=64, max_running=256, free_blocks=10_000, policy_version=1
        )
        return listed.SerializeToString()

    def decide(self, listed: Collection[str]) -> DecisionCost:
        """Return what a decision by these listings costs, and let all samples grow."""
        answers = {name: self.answer(name) for name in listed}
        began = time.process_time()
        lengths_of, views, samples = self.learned.lengths_of(_MODEL), [], 0
        for name, answer in answers.items():
            response = pb.ListSamplesResponse.FromString(answer)
            lengths: dict[Hashable, int] = {each.key: each.response_tokens for each in response.samples}
            lengths_of.saw(name, lengths)
            samples += len(lengths)
            views.append(
                instance_view(name, _MODEL, response, self.roofline, lengths_of, gives=True, receives=True)
            )
        plan(views, self.config.rules(self.learned))
        seconds = time.process_time() - began
        for grown in self.lengths.values():
            grown[:] = [min(length + _GROWTH, _LIMIT - 1) for length in grown]
        return DecisionCost(len(answers), samples, sum(map(len, answers.values())), seconds)


def of_all(fleet: ListedFleet) -> DecisionCost:
    """Return the cost of a decision for which every instance lists its samples."""
    return fleet.decide(fleet.lengths.keys())


def of_chosen(fleet: ListedFleet) -> list[DecisionCost]:
    """Return the costs of decisions for which the chosen instances list theirs, the choice included."""
    choice, found = ListingChoice(), list[DecisionCost]()
    for _ in range(_DECISIONS):
        began = time.process_time()
        listed = choice.choose(fleet.loads(), fleet.config.rules(fleet.learned))
        chosen = time.process_time() - began
        cost = fleet.decide(listed)
        found.append(DecisionCost(cost.instances, cost.samples, cost.bytes, cost.seconds + chosen))
        choice.decided(())
    return found


def main() -> None:
    """Measure, show and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--instances", default="125,1000")
    parser.add_argument("--samples", type=int, default=256, help="most samples of an instance")
    given = parser.parse_args()
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for instances in map(int, given.instances.split(",")):
        for kind, costs in (
            ("all", [of_all(ListedFleet(instances, given.samples))]),
            ("chosen", of_chosen(ListedFleet(instances, given.samples))),
        ):
            rows.append((f"{instances:,}, {kind}", *_shown(costs)))
            figures[f"{kind}_seconds_{instances}"] = max(each.seconds for each in costs)
            figures[f"{kind}_megabytes_{instances}"] = max(each.bytes for each in costs) / 1e6
    columns = ("instances, listed", "instances", "samples", "MB", "s", "longest, s")
    show_rows("reallocating", columns, rows)
    table = {"columns": columns, "rows": rows}
    write("reallocating", {**figures, "tables": {"decisions": table}, "options": vars(given)})


def _shown(costs: Sequence[DecisionCost]) -> tuple[str, ...]:
    return (
        f"{fmean(each.instances for each in costs):,.0f}",
        f"{fmean(each.samples for each in costs):,.0f}",
        f"{fmean(each.bytes for each in costs) / 1e6:.2f}",
        f"{fmean(each.seconds for each in costs):.3f}",
        f"{max(each.seconds for each in costs):.3f}",
    )


if __name__ == "__main__":
    main()
