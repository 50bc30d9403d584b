"""Deltas of recorded GRPO steps in bfloat16, and merges of adapters: bytes and speed.

    make bench NAME=weight_deltas

tinymath is trained at three learning rates on a platform, with float32 masters; what would be pushed is their cast
to bfloat16. Shares are of the bytes of a version's tensors, all files of the delta counted. Speeds are of one
processor, by its time, on the weights of a step repeated to `--megabytes`, with reading from and writing to the
page cache. `--recorded` measures a recording of an earlier run again.
"""

from __future__ import annotations

import argparse
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from bench.report import console, show_table, write
from bench.systems import plain_platform
from bench.training import TrainedStep
from bench.trajectory import record
from examples.tinymath.train import MODEL, Options
from paceline import delta, safetensors
from services.generation.weights.adapters import merged, plan_merge
from services.generation.weights.manifest import read_manifest
from services.generation.weights.staging import stage

FOLDER = Path("runs/bench/weight_deltas")
RATES = ("5e-4", "1e-5", "1e-6")
GOALS = {"delta_bytes_share": 0.25, "delta_bytes_share_1e-6": 0.05}
_RANK = 16
_COLUMNS = (
    ("changed", "changed_share"),
    ("bytes, largest", "largest_share"),
    ("after warm-up", "largest_share_after_warm_up"),
    ("encode MB/s", "encode_mb_per_second"),
    ("expand MB/s", "expand_mb_per_second"),
    ("check MB/s", "check_mb_per_second"),
)
# Adam's first updates are of the size of the learning rate, whatever the gradients are.
_WARM_UP = 4


def main() -> None:
    """Record unless told otherwise, measure, show and write."""
    warnings.simplefilter("ignore", SyntaxWarning)  # of packages that reasoning-gym imports
    given = _arguments()
    recorded = given.recorded or record_steps(FOLDER, given.steps)
    result = measure(recorded, FOLDER / "measured", given.megabytes)
    show_table("deltas of GRPO steps, bfloat16", _COLUMNS, result["by_learning_rate"])
    write("weight_deltas", {**result, "goals": GOALS, "options": vars(given) | {"recorded": str(recorded)}})


def record_steps(folder: Path, steps: int) -> Path:
    """Train at each learning rate; the versions are in `folder/RATE/v00000001` and so on."""
    began = time.monotonic()
    for place, rate in enumerate(RATES):
        options = Options(steps=steps, max_tokens=300, lr=float(rate))
        done = partial(_say_recorded, rate, place * steps, len(RATES) * steps, began)
        record(plain_platform(MODEL, 1, folder / "platform"), options, folder / rate, done)
    return folder


def measure(recorded: Path, scratch: Path, megabytes: int) -> dict[str, Any]:
    """Return the figures of a recording, for the JSON."""
    shutil.rmtree(scratch, ignore_errors=True)
    table: dict[str, dict[str, Any]] = {}
    try:
        for rate in RATES:
            versions = [MODEL, *sorted((recorded / rate).glob("v[0-9]*"))]
            steps = [_step(*pair, scratch / f"{rate}-{n}") for n, pair in enumerate(pairwise(versions))]
            speed = _speed(versions[-2], versions[-1], scratch / rate, megabytes)
            shares = [step["share"] for step in steps]
            table[rate] = {
                "changed_share": max(step["changed"] for step in steps),
                "largest_share": max(shares),
                "largest_share_after_warm_up": max(shares[_WARM_UP:], default=max(shares)),
                "shares": shares,
                **speed,
            }
            console().print(f"measured {rate}: largest share {max(shares):.4f}")
        merging = _merging(MODEL, scratch / "merging", megabytes)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return {
        "delta_bytes_share": max(each["largest_share"] for each in table.values()),
        "delta_bytes_share_1e-6": table["1e-6"]["largest_share"],
        "by_learning_rate": table,
        **merging,
    }


def _step(before: Path, after: Path, scratch: Path) -> dict[str, float]:
    """Return the share of the bytes, and of the numbers that changed, of one step."""
    old, new = _pushed(before), _pushed(after)
    folders = [_written(scratch / name, each.items()) for name, each in (("old", old), ("new", new))]
    written = delta.encode(folders[0], 0, folders[1], scratch / "delta")
    stored = sum(path.stat().st_size for path in (scratch / "delta").iterdir())
    assert stored >= written.bytes
    changed = sum(int((old[name] != new[name]).sum()) for name in new)
    shutil.rmtree(scratch)
    return {
        "share": stored / sum(each.nbytes for each in new.values()),
        "changed": changed / sum(each.numel() for each in new.values()),
    }


def _speed(before: Path, after: Path, scratch: Path, megabytes: int) -> dict[str, float]:
    """Return MB/s of one processor, of the weights of a step repeated."""
    old, new = _pushed(before), _pushed(after)
    base = _written(scratch / "old", _repeated(old, megabytes))
    folder = _written(scratch / "new", _repeated(new, megabytes))
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e6
    encoding = _seconds(lambda: delta.encode(base, 0, folder, scratch / "delta", threads=1))
    (scratch / "made").mkdir()
    expanding = _seconds(lambda: delta.expand(base, scratch / "delta", scratch / "made", threads=1))
    names = [path.name for path in folder.glob("*.safetensors")]
    assert all((folder / name).read_bytes() == (scratch / "made" / name).read_bytes() for name in names)
    manifest = read_manifest(folder)
    checking = _seconds(lambda: stage(scratch / "made", 1, manifest, safetensors.checksum(folder)))
    copying = _seconds(lambda: shutil.copytree(folder, scratch / "copy"))
    shutil.rmtree(scratch)
    return {
        "encode_mb_per_second": size / encoding,
        "expand_mb_per_second": size / expanding,
        "check_mb_per_second": size / checking,
        "copy_mb_per_second": size / copying,
    }


def _merging(model: Path, scratch: Path, megabytes: int) -> dict[str, float]:
    """Return MB/s of one processor of merging an adapter for every matrix, alone and with writing the result."""
    base = dict(_repeated(_pushed(model), megabytes))
    matrices: dict[str, torch.Tensor] = {}
    for name, tensor in base.items():
        if tensor.dim() == 2 and "proj" in name:
            stem = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            matrices[f"{stem}A.weight"] = torch.randn(_RANK, tensor.shape[1]) * 0.01
            matrices[f"{stem}B.weight"] = torch.randn(tensor.shape[0], _RANK) * 0.01
    found = {name: tuple(tensor.shape) for name, tensor in matrices.items()}
    shapes = {name: tuple(tensor.shape) for name, tensor in base.items()}
    plan = plan_merge({"r": _RANK, "lora_alpha": 32}, found, shapes)
    size = sum(tensor.nbytes for tensor in base.values()) / 1e6
    for _ in merged(dict(list(base.items())[:40]), plan, matrices, 1):
        pass  # the kernel is compiled or loaded
    merging = _seconds(lambda: sum(1 for _ in merged(base, plan, matrices, 1)))
    writing = _seconds(lambda: _written(scratch, merged(base, plan, matrices, 1)))
    return {"merge_mb_per_second": size / merging, "merge_and_write_mb_per_second": size / writing}


def _pushed(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights of a version as they are pushed."""
    found = load_file(folder / "model.safetensors")
    # Tied: of the state dict, not of the checkpoint.
    found.pop("lm_head.weight", None)
    return {name: tensor.to(torch.bfloat16) for name, tensor in sorted(found.items())}


def _repeated(weights: dict[str, torch.Tensor], megabytes: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights again and again, each matrix as one that is larger."""
    times = max(1, round(megabytes * 1e6 / sum(tensor.nbytes for tensor in weights.values())))
    for name, tensor in weights.items():
        yield name, tensor.repeat(times, *[1] * (tensor.dim() - 1))


def _written(folder: Path, tensors: Any) -> Path:
    folder.mkdir(parents=True)
    safetensors.write(folder, tensors)
    return folder


def _seconds(work: Callable[[], object]) -> float:
    """Return the processor time of this process."""
    began = time.process_time()
    work()
    return time.process_time() - began


def _say_recorded(rate: str, before: int, steps: int, began: float, step: TrainedStep) -> None:
    done = before + step.step + 1
    left = (time.monotonic() - began) / done * (steps - done)
    console().print(
        f"recorded {rate}, {done} of {steps} steps, about {left / 60:.0f} min left", highlight=False
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=8, help="GRPO steps at each learning rate")
    parser.add_argument("--megabytes", type=int, default=256, help="size of the weights of which speeds are")
    parser.add_argument("--recorded", type=Path, help="folder of an earlier recording")
    return parser.parse_args()


if __name__ == "__main__":
    main()
