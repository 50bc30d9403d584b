"""Command `paceline calibrate`: measure the step times of an engine and save the sweep for similar instances."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from services.platform.launching import bind_ranks
from services.platform.memory import keep_freed_memory
from services.step_time.machine import on_cpu
from services.step_time.sweep import MeasuredStep, SavedSweep, SweepSubject

_KV_BYTES = 1 << 30
app = typer.Typer(add_completion=False, rich_markup_mode=None)


@app.command()
def calibrate(
    model: Annotated[Path, typer.Option(help="Model folder in Hugging Face layout.")],
    out: Annotated[Path, typer.Option(help="Folder for the sweep.")] = Path("runs/calibration"),
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    seconds: Annotated[float, typer.Option(min=0.1, help="Most time of the sweep without prefill.")] = 20,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(min=1, help="Largest batch. Default: vLLM's for the device, as instances have."),
    ] = None,
    draft_window: Annotated[
        int, typer.Option(min=1, help="Most draft tokens of a sample, which decides on CUDA graphs.")
    ] = 16,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="Devices of an instance.")] = 1,
    threads_bind: Annotated[
        str | None, typer.Option(help="CPU cores of the engine, such as 0-3. Default: all.")
    ] = None,
) -> None:
    """Measure the step times of a model on this machine.

    Its instances need not measure them when they start. Exit status 2: the model cannot be measured.
    """
    try:
        batch = (max_num_seqs, draft_window)
        saved = _measure(model, dtype, seconds, batch, tensor_parallel_size, threads_bind)
    except (OSError, ValueError) as error:
        typer.echo(f"paceline: {model} cannot be calibrated: {error}", err=True)
        raise typer.Exit(2) from None
    Console().print(_table(saved.steps))
    typer.echo(f"saved in {saved.save(out)}")


def _measure(
    model: Path,
    dtype: str,
    seconds: float,
    batch: tuple[int | None, int],
    size: int,
    threads_bind: str | None,
) -> SavedSweep:
    if not (model / "config.json").is_file():
        # Checked before the engine is built, which takes much longer.
        raise ValueError("it has no config.json")
    binding = bind_ranks(threads_bind, size)
    if binding is not None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = binding
    from services.generation.engine.core import Engine
    from services.generation.engine.startup import measure_steps, warm_up
    from services.generation.engine.types import EngineOptions

    if on_cpu():
        # As instances do.
        keep_freed_memory()
    engine = Engine(
        EngineOptions(
            str(model),
            dtype=dtype,
            max_num_seqs=batch[0],
            draft_window=batch[1],
            tensor_parallel_size=size,
            # On a GPU vLLM uses the memory that is free.
            kv_cache_memory_bytes=_KV_BYTES if on_cpu() else None,
        )
    )
    try:
        warm_up(engine)
        subject = SweepSubject.of(model, engine.hardware, size, engine.dtype)
        return SavedSweep(subject=subject, steps=tuple(measure_steps(engine, seconds)))
    finally:
        engine.shutdown()


def _table(steps: tuple[MeasuredStep, ...]) -> Table:
    table = Table(title="Step times, ms", box=None, padding=(0, 2, 0, 0))
    for name in ("samples", "rows", "context", "measured"):
        table.add_column(name, justify="right")
    for step in sorted(steps, key=lambda each: (each.samples, each.rows, each.context)):
        table.add_row(str(step.samples), str(step.rows), str(step.context), f"{step.seconds * 1e3:.2f}")
    return table
