"""Rollouts of TRL's trainers on Paceline. Needs the extra `trl`.

    from paceline.integrations.trl import PacelineRollout

    with Client("127.0.0.1:7400") as client, client.run("run-1", seed=7) as run:
        GRPOTrainer(model, reward, args, data, rollout_func=PacelineRollout(run)).train()

Importing this imports neither TRL nor torch; naming `PacelineGRPOTrainer` or `PacelineRolloutWorker` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from paceline.integrations import RolloutFailedError, UnsupportedTrainerError
from paceline.integrations.trl.async_grpo import PacelineWeightTransfer
from paceline.integrations.trl.rollout import PacelineRollout

if TYPE_CHECKING:
    from paceline.integrations.trl.async_worker import PacelineRolloutWorker
    from paceline.integrations.trl.trainer import PacelineGRPOTrainer

__all__ = [
    "PacelineGRPOTrainer",
    "PacelineRollout",
    "PacelineRolloutWorker",
    "PacelineWeightTransfer",
    "RolloutFailedError",
    "UnsupportedTrainerError",
]

_MODULES = {"PacelineGRPOTrainer": "trainer", "PacelineRolloutWorker": "async_worker"}
"""Modules that import TRL, by the class that they define."""


def __getattr__(name: str) -> object:
    """Import a class that needs TRL, and with it TRL, on first use."""
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
