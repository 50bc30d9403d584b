"""Cost of placing a sample, at small and large numbers of instances.

Fills the instances (100 samples each, groups of 8), and then replaces ended samples by waiting ones, as in the
middle of a step. Writes runs/bench/placing.json.

    python -m bench.placing [--instances 125 1000]
"""

from __future__ import annotations

import argparse
import random
import time

from bench.report import show, write
from services.gateway.dispatch.placement import InstancePool, InstanceSlots
from services.gateway.dispatch.waiting_queue import Placement, WaitingQueue, WaitingSample

_PER_INSTANCE, _GROUP, _RUNS = 100, 8, ("a", "b", "c")


def place(instances: int) -> tuple[float, float]:
    """Return the microseconds of a sample while the instances are filled, and while samples end and follow."""
    rng, queue, pool = random.Random(1), WaitingQueue[int](), InstancePool()
    slots = {f"i{number}": InstanceSlots(f"i{number}", 1, _PER_INSTANCE) for number in range(instances)}
    for each in slots.values():
        pool.add(each)
    total = instances * _PER_INSTANCE
    lengths = [rng.uniform(100, 4000) for _ in range(2 * total // _GROUP + 1)]
    for number in range(2 * total):
        group = number // _GROUP
        queue.push(WaitingSample(number, group, 1, lengths[group], number, _RUNS[group % 3]))
    begin, placed = time.perf_counter(), list[Placement[int]]()
    while (placement := queue.place_next(pool)) is not None:
        placed.append(placement)
    filled = time.perf_counter()
    rng.shuffle(placed)
    for placement in placed:
        waiting = placement.waiting
        slots[placement.instance_id].give_back(waiting.prompt, waiting.predicted)
        queue.place_next(pool)
    over = time.perf_counter()
    return 1e6 * (filled - begin) / total, 1e6 * (over - filled) / total


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--instances", type=int, nargs="+", default=[125, 1000])
    figures: dict[str, float] = {}
    for instances in parser.parse_args().instances:
        filling, following = place(instances)
        figures[f"us_filling_{instances}"] = round(filling, 2)
        figures[f"us_following_{instances}"] = round(following, 2)
    show("Placing a sample", figures)
    write("placing", figures)


if __name__ == "__main__":
    main()
