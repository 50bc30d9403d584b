"""The kernels on a GPU: time, throughput, share of the roofline, and the same by what a user would have otherwise.

    python -m kernels.bench [--only attention sampler w4a16 kv_pack kd_loss] [--out runs/bench/kernels.json]

The ceilings are measured first, on the same device: the bandwidth of a large copy, and the rate of a large bfloat16
product. Times are medians of many runs, the L2 cache flushed before each. Without a GPU nothing is measured and
nothing is written: the status is 2. Tests are elsewhere (pytest -m gpu tests/unit/kernels).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from kernels.bench_cases import CASES, Case, Sizes

NO_DEVICE = 2
_COPY_BYTES = 1 << 30
_SIDE = 8192
_HEADS = ("kernel", "setting", "by", "time us", "GB/s", "TFLOP/s", "of roofline", "ours is")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and write; the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", metavar="KERNEL", help="default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/bench/kernels.json"))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("kernels.bench: no CUDA device here; nothing was measured and nothing written", file=sys.stderr)
        return NO_DEVICE
    unknown = set(options.only or ()) - set(CASES)
    if unknown:
        parser.error(f"--only must name some of {', '.join(CASES)}, got {', '.join(sorted(unknown))}")
    ceilings = {"bytes_per_second": copy_rate(), "flops": product_rate()}
    rows: list[dict[str, Any]] = []
    for name in options.only or CASES:
        for case in CASES[name](torch.device("cuda"), Sizes()):
            rows.extend(measured(case, ceilings, seconds))
        torch.cuda.empty_cache()
    print(table(rows, ceilings, torch.cuda.get_device_name()))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({**about(), "ceilings": ceilings, "rows": rows}, indent=2) + "\n")
    print(f"written to {options.out}")
    return 0


def seconds(run: Callable[[], Any]) -> float:
    """Median time of a run, the L2 cache flushed before each."""
    from triton.testing import do_bench  # type: ignore[import-untyped]

    return float(do_bench(run, warmup=50, rep=300, return_mode="median")) / 1000


def copy_rate() -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _COPY_BYTES / seconds(lambda: target.copy_(source))


def product_rate() -> float:
    """Floating-point operations per second of a large bfloat16 product."""
    a, b = torch.randn(2, _SIDE, _SIDE, device="cuda").bfloat16()
    return 2 * _SIDE**3 / seconds(lambda: a @ b)


def measured(
    case: Case, ceilings: dict[str, float], timed: Callable[[Callable[[], Any]], float]
) -> Iterator[dict[str, Any]]:
    """Yield a row per implementation; one that cannot run here has its error instead of figures.

    Raises what our own implementation raises.
    """
    roofline = max(case.moved / ceilings["bytes_per_second"], case.flops / ceilings["flops"])
    ours = None
    for name, maker in case.makers.items():
        row: dict[str, Any] = {"kernel": case.kernel, "setting": case.setting, "by": name}
        try:
            taken = timed(maker())
        except Exception as error:  # Rivals come from libraries that may be absent or of another version.
            if name == "ours":
                raise
            yield {**row, "error": f"{type(error).__name__}: {error}"}
            continue
        ours = taken if ours is None else ours
        yield {
            **row,
            "seconds": taken,
            "bytes_per_second": case.moved / taken,
            "flops": case.flops / taken,
            "of_roofline": roofline / taken,
            "ours_is": taken / ours,
        }


def table(rows: Sequence[dict[str, Any]], ceilings: dict[str, float], device: str) -> str:
    """All rows as text."""
    lines = [_HEADS, *(_line(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADS))]
    text = [
        "  ".join(
            c.ljust(w) if i < 3 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    head = (
        f"{device}: copies {ceilings['bytes_per_second'] / 1e9:.0f} GB/s, "
        f"multiplies {ceilings['flops'] / 1e12:.0f} TFLOP/s"
    )
    failed = [f"{row['by']} ({row['setting']}): {row['error']}" for row in rows if "error" in row]
    return "\n".join((head, *text, *failed))


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    names = (row["kernel"], row["setting"], row["by"])
    if "error" in row:
        return (*names, "-", "-", "-", "-", "-")
    return (
        *names,
        f"{row['seconds'] * 1e6:.1f}",
        f"{row['bytes_per_second'] / 1e9:.0f}",
        f"{row['flops'] / 1e12:.1f}" if row["flops"] else "-",
        f"{row['of_roofline']:.0%}",
        f"{row['ours_is']:.2f} x faster",
    )


def about() -> dict[str, Any]:
    """Return the machine and the software."""
    return {
        "device": torch.cuda.get_device_name(),
        "software": {name: _version(name) for name in ("torch", "triton", "vllm", "flashinfer-python")},
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
