"""One rank of a trainer that writes sharded tensors: `python -m tests.support.ranks_of_a_trainer RANK FOLDER`.

Prints what each push came to, in JSON, before the last one and after it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from paceline import PacelineError, ShardedTensors, WeightFolder
from paceline.weights.safetensors import ShardLayout

RANKS = 2
SHARD_BYTES = 6000
# The trainer's own limit. The test kills nothing that would let this pass: what dies is noticed at once.
_SECONDS = 120.0


def whole_tensors() -> dict[str, torch.Tensor]:
    """Tensors of one process: odd sizes, other dtypes, none of a single rank, and a scalar."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.Linear(17, 1), torch.nn.LayerNorm(1))
    own = {
        "bf16": torch.randn(7, 5).to(torch.bfloat16),
        "columns": torch.randn(4, 9),
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.5),
        "steps": torch.arange(5),
    }
    return dict(model.state_dict()) | own | {f"layer.{number}": torch.randn(40, 8) for number in range(12)}


def sharded_tensors() -> dict[str, Any]:
    """The same tensors, in parts: of FSDP2, and sharded along rows, columns or not at all."""
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = whole_tensors()
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(33, 17), torch.nn.Linear(17, 1), torch.nn.LayerNorm(1))
    fully_shard(model, mesh=mesh)
    found: dict[str, Any] = dict(model.state_dict())
    assert all(isinstance(tensor, DTensor) for tensor in found.values())
    found["bf16"] = distribute_tensor(whole["bf16"], mesh, [Shard(0)])
    found["columns"] = distribute_tensor(whole["columns"], mesh, [Shard(1)])
    found |= {name: whole[name] for name in ("empty", "scalar", "steps")}
    found |= {f"layer.{n}": distribute_tensor(whole[f"layer.{n}"], mesh, [Shard(0)]) for n in range(12)}
    return found


def push(weights: WeightFolder, version: int, tensors: Callable[[], ShardedTensors]) -> str:
    """Write a version with all ranks; return the error, "" if there was none."""
    try:
        made = tensors()
        if dist.get_rank() == 0:
            weights.write(version, made)
        else:
            made.join()
    except (PacelineError, OSError, ValueError) as error:
        return f"{type(error).__name__} {getattr(error, 'reason', '')} {error}"
    return ""


def on_rank_1(action: Callable[[], object], after: int) -> None:
    """Have rank 1 do something when it writes its nth tensor."""
    plain, seen = ShardLayout.content, 0

    def content(self: ShardLayout, entry: Any) -> Any:
        nonlocal seen
        seen += 1
        if seen > after:
            action()
        return plain(self, entry)

    if dist.get_rank() == 1:
        ShardLayout.content = content  # type: ignore[method-assign]


def disk_full() -> None:
    """Fail as a full disk does."""
    raise OSError(28, "No space left on device")


def main(rank: int, folder: Path) -> None:
    """Push in all the ways that the tests judge; rank 1 dies in the last one."""
    store = dist.FileStore(str(folder / "store"), RANKS)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=_SECONDS)
    )
    weights = WeightFolder(folder / "run", folder / "model", shard_bytes=SHARD_BYTES)
    parts = sharded_tensors()

    def tensors() -> ShardedTensors:
        return ShardedTensors(parts, timeout_seconds=_SECONDS)

    def given_up() -> ShardedTensors:
        made = tensors()
        if rank == 0:
            made.give_up()
        return made

    found = {"whole": push(weights, 1, tensors)}
    found["other"] = push(
        weights, 2, lambda: ShardedTensors(parts if rank else {**parts, "more": parts["bf16"]})
    )
    found["given_up"] = push(weights, 2, given_up)
    plain = ShardLayout.content
    on_rank_1(disk_full, after=2)
    found["full"] = push(weights, 2, tensors)
    ShardLayout.content = plain  # type: ignore[method-assign]
    found["again"] = push(weights, 3, tensors)
    print(json.dumps(found), flush=True)
    on_rank_1(lambda: os._exit(9), after=2)
    found["dead"] = push(weights, 4, tensors)
    print(json.dumps(found), flush=True)
    # The rank that is gone is not waited for.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
