"""Rollouts of TRL's GRPOTrainer on Paceline. Needs the extra `trl`.

    from paceline.integrations.trl import PacelineRollout

    with Client("127.0.0.1:7400") as client, client.run("run-1", seed=7) as run:
        GRPOTrainer(model, reward, args, data, rollout_func=PacelineRollout(run)).train()

Importing this imports neither TRL nor torch; naming `PacelineGRPOTrainer` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.integrations.errors import RolloutFailedError, UnsupportedTrainerError
from paceline.integrations.trl.rollout import PacelineRollout

if TYPE_CHECKING:
    from paceline.integrations.trl.trainer import PacelineGRPOTrainer

__all__ = ["PacelineGRPOTrainer", "PacelineRollout", "RolloutFailedError", "UnsupportedTrainerError"]


def __getattr__(name: str) -> object:
    """Import the trainer, and with it TRL, when it is named."""
    if name == "PacelineGRPOTrainer":
        from paceline.integrations.trl.trainer import PacelineGRPOTrainer

        return PacelineGRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
