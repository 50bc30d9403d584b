"""The step-time model that an instance's curve starts from."""

from __future__ import annotations

from pathlib import Path

import structlog

from services.platform.registry import InstanceRecord
from services.policy.models import architecture_of
from services.policy.step_time import Architecture, StepTime, UnsupportedArchitecture
from services.policy.stored import Calibration
from services.reallocator.config import ReallocatorConfig
from services.reallocator.threshold import Roofline

log = structlog.get_logger(__name__)

# Of a model that cannot be looked at: small, so that what is measured soon says all.
_UNKNOWN = Architecture(weight_bytes=1e8, kv_bytes=1e4, dense_flops=1e8, attention_flops=1e4)


class Rooflines:
    """Makes the curves of instances; those of one model and device share one, so that what is measured of any says
    something of all, and noise does not tell equals apart. The calibration is read once.

    Raises, when built:
        UnusableCalibration: it cannot be read.
    """

    def __init__(self, config: ReallocatorConfig) -> None:
        self._config = config
        self._calibration = Calibration.load(config.calibration) if config.calibration else None
        self._told: set[str] = set()
        self._shared: dict[tuple[str, str, int], Roofline] = {}

    def __call__(self, record: InstanceRecord) -> Roofline:
        kind = (record.model, record.device, record.max_running)
        if kind not in self._shared:
            self._shared[kind] = Roofline(
                self._model(record.model), record.max_running, self._config.flatness
            )
        return self._shared[kind]

    def _model(self, model: str) -> StepTime:
        if self._calibration is not None:
            return self._calibration.step_time
        try:
            return StepTime.prior(architecture_of(Path(model), self._config.dtype))
        except UnsupportedArchitecture as error:
            if model not in self._told:
                log.warning("no_step_time_model", reason=str(error))
            self._told.add(model)
            return StepTime.prior(_UNKNOWN)
