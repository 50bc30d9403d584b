"""Rollouts of verl on Paceline. Needs the extra `verl`.

verl loads `paceline.integrations.verl.plugin` by the entry point `paceline` of the group `verl.plugins`. With
`actor_rollout_ref.rollout.name=paceline` its trainers and agents generate on the fleet that
`actor_rollout_ref.rollout.engine_kwargs.paceline` names.

This package imports neither verl, torch nor Ray; the plugin does.
"""

from paceline.integrations import RolloutFailedError, UnsupportedTrainerError
from paceline.integrations.verl.settings import FleetSettings

__all__ = ["FleetSettings", "RolloutFailedError", "UnsupportedTrainerError"]
