"""Sweep of a device whose step times are known, as an instance measures it when it starts. Deterministic."""

from __future__ import annotations

from random import Random

from services.simulator.device_tables import DeviceTable
from services.step_time.prior import MeasuredStep
from services.step_time.sweep import SWEEP_SECONDS, swept_batches

NOISE = 0.03
"""Standard deviation of measured step times, as a share."""


def swept(
    device: DeviceTable, max_samples: int, seed: int = 0, *, noise: float = NOISE
) -> list[MeasuredStep]:
    """Return the steps that a sweep of the device measures, with such noise, before its time is over."""
    random, found, left = Random(seed), list[MeasuredStep](), SWEEP_SECONDS
    for batch in swept_batches(max_samples, device.most_rows, 1 << 16, device.graphs):
        for rows in batch.rows:
            if left <= 0:
                return found
            context = batch.samples * batch.prompt
            seconds = device.seconds(batch.samples, rows, context)
            left -= 2 * seconds
            measured = seconds * random.lognormvariate(0, noise)
            found.append(MeasuredStep(samples=batch.samples, rows=rows, context=context, seconds=measured))
    return found
