"""Measure gain and cost of moving running samples, and compare with ending and resuming them by prefix.

There are two instances, each on its own cores, and two loads: RLHFSpec's Figure 5 (24 samples on one instance and 1
on the other, all equally long, on a model large enough to be compute-bound), and tinymath's long tail (the prompts
with the longer responses on one instance, as in Figure 14). Each load runs without moves, with the reallocator, and
with the reallocator's moves made by ending the sample and resuming it by its prefix on the other instance. A round
runs all three. Without moves comes first in every other round and last in the others. Ratios are computed within a
round; figures are their medians with confidence intervals. The reallocator has its default settings. Its process is
stopped while it is not wanted. It has learned the cost of moves from the warm-up and from earlier rounds, as a
long-running one has. All tokens are compared with the tokens of samples that were never moved. Writes
runs/bench/migration.json.

    python -m bench.migration [--rounds 6] [--tail-rounds 15]
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.comparison import Comparison
from bench.migration.driver import PROMPT_TOKENS, DrivenMove, Driver, LoadResult, Task, figure_5, long_tail
from bench.migration.figures import MOVE, PREFIX, STAY, MigrationRuns, document_table, table_of
from bench.random_model import make_random_model
from bench.report import option_parser, say, show, show_table, write
from bench.rollout.systems import plain_platform
from bench.scrape import Metrics, scrape
from examples.tinymath.options import MODEL
from paceline import SampleKey
from paceline.times import seconds_of
from services.local import Platform

FOLDER = Path("runs/bench/migration")
GOALS = {
    "worst_ratio_vs_no_moves_upper": 1.0,
    "figure5_ratio": 1.25,
    "kv_vs_prefix": 1.0,
    "overhead_share": 0.0387,
    "tokens_differing_share": 1e-5,
}
# Seconds until the reallocator has noticed the end of a round.
_SETTLE_SECONDS = 0.3
_REALLOCATOR = ("--lease-seconds=0.5", "--dtype=float32", "--by=cheaper")
# Rounds of each load before those that count, and tokens of a sample of Figure 5's load.
_WARM_UP, _FIGURE_TOKENS = 2, 400
_COLUMNS = (
    ("seconds", "seconds"),
    ("tokens/s", "tokens_per_second"),
    ("ratio", "ratio"),
    ("from", "ratio_lower"),
    ("to", "ratio_upper"),
    ("moves", "moves"),
    ("by kv", "moves_by_kv"),
    ("by prefix", "moves_by_prefix"),
    ("gap s", "gap_seconds_median"),
    ("stall steps", "stall_steps_median"),
    ("stall s", "stall_seconds_median"),
    ("overhead", "overhead_share"),
    ("MB moved", "moved_megabytes"),
)


def main() -> None:
    """Measure both loads, then show and write the figures."""
    given = _arguments()
    model = make_random_model(
        FOLDER / "model", hidden=512, layers=8, vocab_size=512, length=PROMPT_TOKENS + _FIGURE_TOKENS + 64
    )
    comparison = Comparison()
    figure = asyncio.run(
        _measure(model, "figure 5", lambda _: figure_5(_FIGURE_TOKENS), given.rounds, comparison)
    )
    tail = asyncio.run(_measure(MODEL, "long tail", long_tail, given.tail_rounds, comparison))
    tables = {"figure_5": table_of(figure), "long_tail": table_of(tail)}
    for name, table in tables.items():
        show_table(f"migration: {name}", _COLUMNS, table)
    figures = _figures(figure, tail, tables, comparison)
    show("migration", figures)
    details = {
        "goals": GOALS,
        "tables": {"moves": document_table(tables)},
        **tables,
        "tokens_compared": comparison.compared,
        "options": vars(given),
    }
    write("migration", {**figures, **details})


def _figures(
    figure: Mapping[str, MigrationRuns],
    tail: Mapping[str, MigrationRuns],
    tables: Mapping[str, Mapping[str, dict[str, Any]]],
    comparison: Comparison,
) -> dict[str, Any]:
    """Return the figures that have goals, and counts of moves."""
    moved, stalls = tables["figure_5"][MOVE], [*figure[MOVE].stall_steps, *tail[MOVE].stall_steps]
    return {
        "worst_ratio_vs_no_moves_upper": min(table[MOVE]["ratio_upper"] for table in tables.values()),
        "figure5_ratio": moved["ratio"],
        "tail_ratio": tables["long_tail"][MOVE]["ratio"],
        "kv_vs_prefix": moved["ratio"] / tables["figure_5"][PREFIX]["ratio"],
        "stall_steps_median": median(stalls) if stalls else None,
        "overhead_share": max(
            (table[MOVE]["overhead_share"] for table in tables.values() if table[MOVE]["moves"]), default=None
        ),
        "moves": sum(table[MOVE]["moves"] for table in tables.values()),
        "moves_by_kv": sum(table[MOVE]["moves_by_kv"] for table in tables.values()),
        "moves_by_prefix": sum(table[MOVE]["moves_by_prefix"] for table in tables.values()),
        "moves_of_moved": sum(each.moved_again for runs in (figure, tail) for each in runs[MOVE].outcomes),
        "tokens_differing_share": comparison.differing_share,
    }


# Measuring ----------------------------------------------------------------------------------------------


async def _measure(
    model: Path,
    name: str,
    tasks_of: Callable[[LoadResult | None], list[Task]],
    rounds: int,
    comparison: Comparison,
) -> dict[str, MigrationRuns]:
    runs = {system: MigrationRuns() for system in (STAY, MOVE, PREFIX)}
    config = replace(
        plain_platform(model, 2, FOLDER / name.replace(" ", "-")),
        reallocator=True,
        reallocator_options=_REALLOCATOR,
        policy=False,
    )
    options = (*config.instance_options, "--flush-interval-seconds=0.01")
    with Platform(replace(config, instance_options=options), report=say) as platform:
        async with Driver(_addresses(platform), platform.config.token) as driver:
            # The first run warms everything up, measures response lengths, and lets the reallocator learn.
            tasks = tasks_of(await driver.run(tasks_of(None)))
            for _ in range(_WARM_UP):
                await driver.run(tasks)
            await _reallocate(platform, wanted=False)
            for number in range(rounds):
                plain_first = number % 2 == 0
                plain = await driver.run(tasks) if plain_first else None
                await _reallocate(platform, wanted=True)
                before = scrape(platform)["reallocator"]
                moved = await driver.run(tasks)
                await _look(platform, driver, moved, runs[MOVE], before)
                await _reallocate(platform, wanted=False)
                by_prefix = await driver.run(tasks, _first_moves(moved.moves))
                runs[PREFIX].outcomes.append(by_prefix)
                if plain is None:
                    plain = await driver.run(tasks)
                runs[STAY].outcomes.append(plain)
                truth = _keyed(plain)
                for system, found in ((MOVE, moved), (PREFIX, by_prefix)):
                    comparison.add(f"{name}, {system}, round {number}", truth, _keyed(found))
                _say(name, number, plain, moved, by_prefix)
        # A stopped process does not react to a request to end.
        await _reallocate(platform, wanted=True)
    return runs


async def _look(
    platform: Platform, driver: Driver, outcome: LoadResult, runs: MigrationRuns, before: Metrics
) -> None:
    """Keep a round, and the metrics of donors and reallocator."""
    runs.outcomes.append(outcome)
    for move in outcome.moves:
        if move.by == "kv":
            told = await driver.migration(move)
            runs.stall_steps.append(told.stall_steps)
            runs.stall_seconds.append(seconds_of(told.stall_time))
    runs.reallocator.append(scrape(platform)["reallocator"].since(before))


def _addresses(platform: Platform) -> dict[str, str]:
    with platform.client() as client:
        return {each.instance_id: each.address for each in client.instances()}


async def _reallocate(platform: Platform, *, wanted: bool) -> None:
    """Resume the reallocator's process, or stop it."""
    child = platform.process("reallocator")
    if not wanted:
        await asyncio.sleep(_SETTLE_SECONDS)
    child.signal(signal.SIGCONT if wanted else signal.SIGSTOP)
    if wanted:
        await asyncio.sleep(_SETTLE_SECONDS)


def _first_moves(moves: Sequence[DrivenMove]) -> list[DrivenMove]:
    """Return the first move of each sample, because a repeated move is made only once by prefix."""
    found: dict[str, DrivenMove] = {}
    for move in moves:
        found.setdefault(move.key, move)
    return list(found.values())


def _keyed(outcome: LoadResult) -> dict[SampleKey, list[int]]:
    return {
        SampleKey(prompt, int(slot)): tokens
        for key, tokens in outcome.responses.items()
        for prompt, _, slot in (key.rpartition("/"),)
    }


def _say(name: str, number: int, plain: LoadResult, moved: LoadResult, by_prefix: LoadResult) -> None:
    say(
        f"{name}, round {number}: {plain.seconds:.2f} s as it is, {moved.seconds:.2f} s with {len(moved.moves)} "
        f"moves, {by_prefix.seconds:.2f} s with {len(by_prefix.moves)} of them by prefix"
    )


def _arguments() -> argparse.Namespace:
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="rounds of Figure 5's load")
    parser.add_argument("--tail-rounds", type=int, default=15, help="rounds of the long tail")
    return parser.parse_args()


if __name__ == "__main__":
    main()
