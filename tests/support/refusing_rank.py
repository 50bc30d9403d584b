"""An instance of which the last rank refuses weights: `python -m tests.support.refusing_rank <flags>`.

Everything is the real thing but for one method: there is no memory for the last tensor in that rank, once the file
that REFUSES names is there.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from services.generation.weights.files import MappedTensors

REFUSES = "TESTS_RANK_REFUSES"
"""Environment variable: path of the file."""


class RefusingTensors(MappedTensors):
    """Tensors that are mapped, in the ranks and in the instance, as ever, until they are refused."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if Path(os.environ[REFUSES]).exists() and name == list(self)[-1] and _in_last_rank():
            raise MemoryError(f"no memory for {name}")
        return super().__getitem__(name)


def _in_last_rank() -> bool:
    group = torch.distributed
    return group.is_initialized() and group.get_rank() == group.get_world_size() - 1 > 0


def main() -> None:
    """Serve as services.generation does."""
    from services.generation.__main__ import serve
    from services.generation.config import GenerationConfig
    from services.generation.weights import staging
    from services.platform.service import run

    # Found by this name in the ranks, too.
    from tests.support.refusing_rank import RefusingTensors

    staging.MappedTensors = RefusingTensors  # type: ignore[misc]
    run("generation", serve, GenerationConfig)


if __name__ == "__main__":
    main()
