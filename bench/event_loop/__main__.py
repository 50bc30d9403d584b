"""Cost of the gRPC event loop to the thread that steps the engine: turns with clients against turns without.

A real gateway, Redis and one instance with vLLM's engine; speculation is off, 256 samples decode at once, all of
the same length. In each round the same samples run without a client, as a batch that reports in checkpoints, as a
batch beside 64 Generate streams, whose tokens are reported as they come, and as Generate streams all; in another
order every time; and once without a client, but with the other cores kept busy by programs that have nothing to do
with it. Turns of the engine's thread in which all samples get tokens are compared round by round.

In the layout `own cores` the engine's thread has the last core, and the instance's other threads have the others,
where they go before gateway and client: what is left is contention for the GIL, as on a host with cores enough. In
`one core`, where only the second load runs, all threads of the instance share the engine's.

    python -m bench.event_loop [--rounds 8] [--minutes 9] [--tokens 120] [--switch-seconds 0.0005]

Other programs may run meanwhile: time for which the engine's thread was ready and had no core is counted apart, and
left out of `ratio`. Writes runs/bench/event_loop.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from bench.event_loop.figures import SILENT, summary
from bench.event_loop.instance import SOCKET
from bench.event_loop.loads import ClientLoad, run_load
from bench.report import Figures, cores, show, show_table, write
from paceline import AsyncClient
from services.local.child import ChildSpec, Process, spawned
from services.local.config import PlatformConfig
from services.local.pinning import cpu_environment
from services.local.platform import Platform
from services.platform.cores import cpu_list

OWN_CORES, ONE_CORE = "own cores", "one core"
BUSY = "no client, busy neighbours"
_GOAL = 1.03
_KV_BYTES = 512 << 20
_COLUMNS = (
    ("turn, ms", "turn"),
    ("no core", "no_core"),
    ("ratio", "ratio"),
    ("from", "ratio_low"),
    ("to", "ratio_high"),
    ("processor, more", "more_processor"),
    ("sleep, more", "more_sleep"),
    ("sleeps", "switches"),
    ("flush", "flush_processor"),
    ("step", "step_processor"),
    ("record", "record_processor"),
    ("garbage", "collecting"),
    ("event loop", "event_loop_processor"),
    ("all others", "others_processor"),
)


ALL_CORES = cores()


def main() -> None:
    """Measure, show and write."""
    arguments = _arguments()
    # The client, too, stays away from the engine's core.
    os.sched_setaffinity(0, _others())
    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder) / "rounds"
        options = PlatformConfig(
            model=arguments.model,
            instances=1,
            folder=Path("runs/bench/event_loop"),
            instance_options=_instance_options(arguments.samples),
            environment={**cpu_environment(ALL_CORES[-1:]), SOCKET: str(socket)},
            pin=False,
            policy=False,
            bubbles=False,
            reallocator=False,
        )
        with Platform(options, launch=_launch) as platform:
            figures = asyncio.run(_measure(platform, socket, arguments))
    for layout, table in figures["loads"].items():
        show_table(f"event loop, {layout}: milliseconds a turn of the engine's thread", _COLUMNS, table)
    show("event loop", {name: value for name, value in figures.items() if name != "loads"})
    write("event_loop", figures)


async def _measure(platform: Platform, socket: Path, arguments: argparse.Namespace) -> Figures:
    reader, writer = await asyncio.open_unix_connection(socket)

    async def ask(**asked: Any) -> dict[str, Any]:
        writer.write(json.dumps(asked).encode() + b"\n")
        answer = await reader.readline()
        if not answer:
            raise RuntimeError("the instance is gone; see its log")
        found: dict[str, Any] = json.loads(answer)
        return found

    loads = _loads(arguments.samples)
    mixed = next(name for name, load in loads.items() if load is not None and load.batch and load.streams)
    rounds: dict[str, list[dict[str, Any]]] = {OWN_CORES: [], ONE_CORE: []}
    began, first = time.monotonic(), True
    async with AsyncClient(platform.gateway_address) as client:
        for number in range(arguments.rounds + 1):
            for layout, done in rounds.items():
                found = {}
                names = list(loads) if layout == OWN_CORES else [SILENT, mixed]
                for name in _turned(names, number):
                    answer = await ask(do="begin", samples=arguments.samples, **_layout(layout, arguments))
                    first &= bool(answer["first"])
                    if (load := loads[name]) is None:
                        with _neighbour(name == BUSY):
                            await ask(do="silent", samples=arguments.samples, tokens=arguments.tokens)
                    else:
                        await run_load(client, load, arguments.tokens, 2 * number + (layout == ONE_CORE))
                    found[name] = await ask(do="end")
                if number:
                    done.append(found)
            gone = time.monotonic() - began
            left = gone / (number + 1) * (arguments.rounds - number)
            print(
                f"round {number} of {arguments.rounds}, about {left:.0f} s left", file=sys.stderr, flush=True
            )
            if gone + 2 * gone / (number + 1) > 60 * arguments.minutes:
                break
        boundary = await ask(do="boundary")
    writer.close()
    return _figures(rounds, boundary, arguments, first)


def _figures(
    rounds: dict[str, list[dict[str, Any]]],
    boundary: dict[str, Any],
    arguments: argparse.Namespace,
    first: bool,
) -> Figures:
    loads = {layout: summary(done) for layout, done in rounds.items()}
    own = loads[OWN_CORES]
    reading = [name for name in own if name not in (SILENT, BUSY)]
    sent = {name: value for name, value in boundary.items() if name not in ("samples", "bytes")}
    return {
        **{f"ratio_{name.replace(' ', '_')}": own[name]["ratio"] for name in reading},
        **{f"ratio_{name.replace(' ', '_')}_upper": own[name]["ratio_high"] for name in reading},
        "goal": _GOAL,
        "boundary_ms": 1000 * sum(sent.values()),
        "boundary_of_turn": 1000 * sum(sent.values()) / own[SILENT]["turn"],
        **{f"boundary_{name}_ms": 1000 * value for name, value in sent.items()},
        "boundary_bytes": boundary["bytes"],
        "samples": arguments.samples,
        "tokens": arguments.tokens,
        "rounds": len(rounds[OWN_CORES]),
        "switch_seconds": arguments.switch_seconds,
        "others_go_first": first,
        "load_average": os.getloadavg()[1],
        "loads": loads,
    }


def _loads(samples: int) -> dict[str, ClientLoad | None]:
    streams = samples // 4
    return {
        SILENT: None,
        BUSY: None,
        "batch": ClientLoad(samples, 0),
        f"batch and {streams} streams": ClientLoad(samples - streams, streams),
        f"{samples} streams": ClientLoad(0, samples),
    }


@contextmanager
def _neighbour(busy: bool) -> Iterator[None]:
    """Keep the other cores busy, with programs that have nothing to do with the instance."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in _others() if busy]
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.wait()


def _turned(names: Sequence[str], number: int) -> Sequence[str]:
    """Return the names in an order in which each is at each place equally often."""
    place = number % len(names)
    return [*names[place:], *names[:place]]


def _layout(layout: str, arguments: argparse.Namespace) -> dict[str, Any]:
    engine = ALL_CORES[-1]
    return {
        "engine_core": engine,
        "other_cores": _others() if layout == OWN_CORES else [engine],
        "switch_seconds": arguments.switch_seconds,
    }


def _instance_options(samples: int) -> tuple[str, ...]:
    flags = {
        "dtype": "float32",
        "speculation": "off",
        "max-num-seqs": samples,
        "kv-cache-memory-bytes": _KV_BYTES,
        "threads-bind": cpu_list(ALL_CORES[-1:]),
    }
    return tuple(part for name, value in flags.items() for part in (f"--{name}", str(value)))


def _launch(spec: ChildSpec, log: BinaryIO) -> Process:
    """Start a process, as a rule on the cores of this one; the instance with a socket of ours, and on all cores."""
    if spec.name.startswith("instance"):
        argv = ["bench.event_loop.instance" if word == "services.generation" else word for word in spec.argv]
        return spawned(replace(spec, argv=argv, cores=ALL_CORES), log)
    return spawned(spec, log)


def _others() -> list[int]:
    """Return the cores beside the engine's; where there is one core, that."""
    return list(ALL_CORES[:-1] or ALL_CORES)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=Path("examples/tinymath/model"))
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=9, help="begin no round that would not end by then")
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=120, help="of each sample")
    parser.add_argument(
        "--switch-seconds", type=float, default=0.0005, help="sys.setswitchinterval of the instance"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
