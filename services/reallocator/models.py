"""Choose the step-time model from which an instance's throughput curve starts."""

from __future__ import annotations

from pathlib import Path

import structlog

from services.platform.redis.registry import InstanceRecord
from services.reallocator.config import ReallocatorConfig
from services.reallocator.planning.step_time_model import (
    Architecture,
    StepTime,
    UnsupportedArchitecture,
    architecture_of,
)
from services.reallocator.planning.throughput import Roofline

log = structlog.get_logger(__name__)

# Architecture of an unreadable model: small, so that measured steps soon dominate.
_UNKNOWN = Architecture(weight_bytes=1e8, kv_bytes=1e4, dense_flops=1e8, attention_flops=1e4)


class Rooflines:
    """Throughput curves of instances, one per model and device.

    Equal instances share a curve, so that each measurement counts for all of them and noise does not make them
    differ.
    """

    def __init__(self, config: ReallocatorConfig) -> None:
        self._config = config
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
        try:
            return StepTime(architecture=architecture_of(Path(model), self._config.dtype))
        except UnsupportedArchitecture as error:
            if model not in self._told:
                log.warning("no_step_time_model", reason=str(error))
            self._told.add(model)
            return StepTime(architecture=_UNKNOWN)
