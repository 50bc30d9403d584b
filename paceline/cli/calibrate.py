"""`paceline calibrate`: measures an engine, fits the step-time model, keeps it."""

from __future__ import annotations

import os
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table

from services.platform.heap import keep_freed_memory
from services.policy.calibration import BadFit, Errors, Fit, calibrate, require_good
from services.policy.machine import machine_name, on_cpu
from services.policy.models import VALUE_BYTES, architecture_of
from services.policy.probe import EngineStalled, Grid, measure_bandwidth, measure_throughput, sweep
from services.policy.residual import Residual
from services.policy.stored import Calibration, Subject
from services.policy.sweep import Sweep

_KV_BYTES = 1 << 30


def run_calibration(
    model: Path,
    out: Path,
    dtype: str,
    seconds: float,
    max_num_seqs: int,
    threads_bind: str | None,
    most_median: float,
    most_p90: float,
) -> int:
    """Measures, shows and keeps; the exit status. 1: the fit is bad, and is not kept. 2: nothing to measure."""
    console = Console(width=None if Console().is_terminal else 120)
    try:
        # Before the engine is built, which takes much longer to refuse.
        architecture_of(model, next(iter(VALUE_BYTES)))
        subject, swept, fit = _measure(model, dtype, seconds, max_num_seqs, threads_bind, console)
    except (OSError, ValueError, EngineStalled) as error:
        typer.echo(f"paceline: {model} cannot be calibrated: {error}", err=True)
        return 2
    console.print(_points_table(swept, fit))
    console.print(_parameters_table(fit))
    calibration = Calibration.of(subject, fit, swept)
    out.mkdir(parents=True, exist_ok=True)
    picture = (out / subject.file_name).with_suffix(".svg")
    drawn = _draw(swept, fit, picture)
    typer.echo(f"picture: {picture}" if drawn else "no picture: matplotlib is in the extra `demo`")
    try:
        require_good(fit, most_median, most_p90)
    except BadFit as error:
        typer.echo(f"paceline: not kept: {error}", err=True)
        return 1
    typer.echo(f"kept in {calibration.save(out)}")
    return 0


def _measure(
    model: Path,
    dtype: str,
    seconds: float,
    max_num_seqs: int,
    threads_bind: str | None,
    console: Console,
) -> tuple[Subject, Sweep, Fit]:
    if threads_bind is not None:
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = threads_bind
    from services.generation.engine.core import Engine
    from services.generation.engine.types import EngineOptions
    from services.generation.engine.warmup import warm_up

    cpu = on_cpu()
    if cpu:
        # As instances do.
        keep_freed_memory()
    engine = Engine(
        EngineOptions(
            str(model),
            dtype=dtype,
            max_num_seqs=max_num_seqs,
            # On a GPU vLLM takes what is free.
            kv_cache_memory_bytes=_KV_BYTES if cpu else None,
            enable_prefix_caching=False,
        )
    )
    try:
        warm_up(engine)
        architecture = architecture_of(model, engine.dtype)
        machine = machine_name() if cpu else engine.device
        subject = Subject.of(model.resolve().name, architecture, machine, engine.dtype)
        limits = (max_num_seqs, engine.limits.max_model_len, engine.row_capacity, engine.kv_capacity)
        grid = Grid(seconds=seconds).within(*limits)
        throughput, bandwidth = measure_throughput(engine.dtype), measure_bandwidth()
        with console.status("measuring") as status:
            swept = sweep(engine, grid, lambda done, of: status.update(f"measured {done} of {of} batches"))
        return subject, swept, calibrate(architecture, throughput, bandwidth, swept)
    finally:
        engine.shutdown()


def _points_table(swept: Sweep, fit: Fit) -> Table:
    """Of the points that the fit has not seen: all are a few hundred, and in the picture."""
    table = Table(title="Step times held out from the fit, ms", box=None, padding=(0, 2, 0, 0))
    for name in ("samples", "drafts", "context", "measured", "predicted", "error"):
        table.add_column(name, justify="right")
    rows = sorted(
        (row for row in zip(swept.points, fit.predicted, strict=True) if row[0].held_out),
        key=lambda row: (row[0].requests, row[0].context),
    )
    for point, predicted in rows:
        table.add_row(
            str(point.requests),
            str(point.rows // point.requests - 1),
            str(point.context),
            f"{point.seconds * 1e3:.2f}",
            f"{predicted * 1e3:.2f}",
            f"{predicted / point.seconds - 1:+.1%}",
        )
    return table


def _parameters_table(fit: Fit) -> Table:
    model = fit.step_time
    table = Table(title="The fit", box=None, padding=(0, 2, 0, 0))
    table.add_column("parameter")
    table.add_column("value", justify="right")
    for name, value in (
        ("throughput", f"{model.throughput / 1e9:.4g} GFLOP/s"),
        ("bandwidth", f"{model.bandwidth / 1e9:.4g} GB/s"),
        ("KV scale", f"{model.kv_scale:.4g}"),
        ("base", f"{model.base * 1e3:.4g} ms"),
        ("per sample", f"{model.per_request * 1e6:.4g} µs"),
        ("per draft token", f"{model.per_row * 1e6:.4g} µs"),
        (
            "per 100 tokens of context and √(draft tokens a sample)",
            f"{model.per_attended_token * 1e8:.4g} µs",
        ),
        ("per sample when verifying", f"{model.verify_per_request * 1e6:.4g} µs"),
        ("left over, of the predicted time", _span(model.residual)),
        ("error, fitted points", str(fit.fitted)),
        ("error, held-out points", str(fit.held_out)),
    ):
        table.add_row(name, value)
    return table


def _span(residual: Residual | None) -> str:
    if residual is None:
        return "nothing that was not noise"
    shares = [share for plane in residual.shares for row in plane for share in row]
    return f"{min(shares):+.1%} to {max(shares):+.1%}"


def _draw(swept: Sweep, fit: Fit, path: Path) -> bool:
    """Predicted over measured times as an SVG; False where there is no matplotlib."""
    try:
        import matplotlib

        matplotlib.use("svg")
        from matplotlib import pyplot
    except ModuleNotFoundError:
        return False
    measured, held, plain = swept.column("seconds") * 1e3, swept.held_out, swept.plain
    predicted = fit.predicted * 1e3
    figure, axes = pyplot.subplots(figsize=(6.4, 5.2))
    kinds: tuple[tuple[str, object, str], ...] = (
        ("plain decoding", plain, "o"),
        ("verification", ~plain, "^"),
    )
    for name, chosen, marker in kinds:
        for subset, label, colour in (
            (chosen & ~held, f"{name}, fitted", "#9aa5b1"),
            (chosen & held, f"{name}, held out", "#c2410c"),
        ):
            axes.scatter(measured[subset], predicted[subset], s=18, marker=marker, color=colour, label=label)
    ends = [measured.min() * 0.8, measured.max() * 1.25]
    axes.plot(ends, ends, color="#334155", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured step, ms", ylabel="predicted step, ms")
    axes.set_title(_title(fit.held_out), fontsize=10)
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)
    pyplot.close(figure)
    return True


def _title(errors: Errors) -> str:
    return f"Held-out error: {errors}"
