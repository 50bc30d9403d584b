"""`paceline simulate`: simulate a rollout cluster with the services' own decision code."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.options import Json, add_columns, plain_console, plain_table, print_json
from paceline.errors import how_to_install
from services.bubbles.config import BubblesConfig
from services.contracts.knobs import Knobs
from services.contracts.modes import described
from services.reallocator.config import ReallocatorConfig
from services.simulator.capacity import SimulationProgress, instances_for
from services.simulator.cluster_simulation import ClusterSimulation
from services.simulator.device_tables import DeviceTable, known_devices, read_device
from services.simulator.simulation_setup import (
    PREGENERATED,
    LogNormalLengths,
    SimulatedSource,
    SimulatedWorkload,
    SimulationSetup,
    read_trace,
)

app = typer.Typer(add_completion=False, rich_markup_mode=None)
# Approximate number of simulations in a search for a deadline.
_SEARCH = 10


@app.command()
def simulate(
    context: typer.Context,
    device: Annotated[str, typer.Option(help="Model and device, or a part of the name.")] = "8B H100",
    table: Annotated[
        Path | None, typer.Option(help="Take step times from this JSON file. Default: of --device.")
    ] = None,
    instances: Annotated[int, typer.Option(min=1, help="Generation instances.")] = 8,
    deadline: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS", help="Find the fewest instances whose step takes no longer. Default: none."
        ),
    ] = None,
    least: Annotated[int, typer.Option(min=1, help="With --deadline: fewest instances.")] = 8,
    most: Annotated[int, typer.Option(min=1, help="With --deadline: most instances.")] = 4096,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of a step.")] = 64,
    samples: Annotated[int, typer.Option(min=1, help="Samples of a prompt.")] = 16,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 256,
    median: Annotated[float, typer.Option(min=1, help="Median response, in tokens.")] = 2000,
    spread: Annotated[float, typer.Option(min=0, help="Standard deviation of its logarithm.")] = 0.8,
    limit: Annotated[int, typer.Option(min=1, help="Longest response, in tokens.")] = 16384,
    trace: Annotated[
        Path | None,
        typer.Option(help="Take lengths from JSON Lines, a list for each prompt. Default: draw them."),
    ] = None,
    draft: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=ACCEPTANCE", help="Source of drafts that all samples have. Default: none."
        ),
    ] = None,
    pregenerate: Annotated[
        float | None,
        typer.Option(min=0, max=1, help="Fill bubbles; acceptance of what is pre-generated. Default: no."),
    ] = None,
    reallocate: Annotated[bool, typer.Option("--reallocate", help="Move samples between instances.")] = False,
    decision_steps: Annotated[int, typer.Option(min=1, help="Engine steps between decisions to move.")] = 64,
    mode: Annotated[str, typer.Option(help=described())] = "planner",
    update_seconds: Annotated[float, typer.Option(min=0, help="The trainer's update.")] = 0,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps. Default: 3 with --pregenerate, else 1.")
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, help="Seed of the lengths and of all other random numbers.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Simulate steps of a rollout cluster, or size one.

    With a deadline: find the number of instances that meets it.
    Exit status 2: an option cannot be used; 3: no number of instances meets the deadline.
    """
    try:
        status = _answer(**context.params)
    except ModuleNotFoundError as error:
        typer.echo(f"paceline: deciding on drafts needs {how_to_install('cpu')}: {error}", err=True)
        raise typer.Exit(2) from None
    except (OSError, ValueError) as error:
        typer.echo(f"paceline: {error}", err=True)
        raise typer.Exit(2) from None
    raise typer.Exit(status)


def _answer(deadline: float | None, least: int, most: int, as_json: bool, **given: Any) -> int:
    """Run the simulation or the search, print the result, and return the exit status."""
    setup = _setup(**given)
    return _run(setup, as_json) if deadline is None else _search(setup, deadline, least, most, as_json)


def _setup(
    *,
    device: str,
    table: Path | None,
    instances: int,
    prompts: int,
    samples: int,
    prompt_tokens: int,
    median: float,
    spread: float,
    limit: int,
    trace: Path | None,
    draft: list[str] | None,
    pregenerate: float | None,
    reallocate: bool,
    decision_steps: int,
    mode: str,
    update_seconds: float,
    steps: int | None,
    seed: int,
) -> SimulationSetup:
    lengths = LogNormalLengths(median, spread, limit) if trace is None else read_trace(trace)
    fills = pregenerate is not None
    return SimulationSetup(
        _device(device) if table is None else read_device(table),
        instances,
        SimulatedWorkload(lengths, prompts, samples, prompt_tokens),
        steps or (3 if fills else 1),
        Knobs(mode=mode),
        tuple(_source(each) for each in draft or ()),
        None if pregenerate is None else SimulatedSource(PREGENERATED, pregenerate),
        # Ignores environment variables: the same options give the same answer.
        BubblesConfig.model_construct() if fills else None,
        ReallocatorConfig.model_construct(decision_steps=decision_steps) if reallocate else None,
        update_seconds,
        seed=seed,
    )


def _device(name: str) -> DeviceTable:
    exact = [each for each in known_devices() if each.name == name]
    found = exact or [each for each in known_devices() if name in each.name]
    if len(found) != 1:
        names = ", ".join(repr(each.name) for each in found or known_devices())
        many = "names several devices" if found else "names no device"
        raise ValueError(f"--device {name!r} {many}; give one of {names}")
    return found[0]


def _source(text: str) -> SimulatedSource:
    name, _, acceptance = text.partition("=")
    try:
        return SimulatedSource(name, float(acceptance))
    except ValueError as error:
        raise ValueError(f"--draft {text!r} is not NAME=ACCEPTANCE with a number from 0 to 1") from error


def _search(setup: SimulationSetup, deadline: float, least: int, most: int, as_json: bool) -> int:
    progress = SimulationProgress(_SEARCH * setup.samples)
    answer = instances_for(setup, deadline, least, most, progress)
    if as_json:
        print_json(answer)
    else:
        table = plain_table()
        add_columns(table, "instances", "step s", "longest bubble s", "busy", "tokens/s", number=True)
        for count, step in sorted(answer.tried.items()):
            figures = (step.seconds, step.longest_bubble, step.busy, step.tokens_per_second)
            table.add_row(str(count), *(f"{each:,.4g}" for each in figures))
        plain_console().print(table)
        if answer.instances is None:
            typer.echo(f"{most} instances do not meet {deadline:g} s")
        else:
            typer.echo(f"{answer.instances} instances meet {deadline:g} s")
    return 3 if answer.instances is None else 0


def _run(setup: SimulationSetup, as_json: bool) -> int:
    steps = list(ClusterSimulation(setup, SimulationProgress(setup.samples)).run())
    if as_json:
        print_json([asdict(each) | {"tokens_per_second": each.tokens_per_second} for each in steps])
        return 0
    table = plain_table()
    add_columns(table, "figure")
    add_columns(table, *(f"step {n}" for n in range(len(steps))), number=True)
    for name in (*asdict(steps[0]), "tokens_per_second"):
        table.add_row(name, *(f"{getattr(each, name):,.5g}" for each in steps))
    plain_console().print(table)
    return 0
