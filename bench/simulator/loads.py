"""The published set-ups: curves and lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from services.reallocator.planning.throughput import ThroughputCurve

PUBLISHED = {1: 103.0, 6: 765.0, 19: 1415.0, 24: 1453.0}
"""RLHFSpec, section 3.3 (Figure 5): tokens a second of an instance with so many samples."""
PUBLISHED_BEFORE, PUBLISHED_AFTER = 1556.0, 2180.0
"""The same: of 24 + 1 samples, and of 19 + 6."""
LMSYS_MEDIAN, LMSYS_P95, LMSYS_LIMIT = 378, 1373, 2048
"""Section 3.1: response lengths of LMSYS-Chat-1M; section 7.1: the limit."""
_Z95 = 1.6449


def published_curve(most: int = 64) -> ThroughputCurve:
    """Step times between the published points; beyond the last they grow as between the last two."""
    counts = np.array(sorted(PUBLISHED), float)
    seconds = counts / np.array([PUBLISHED[int(each)] for each in counts])
    slope = (seconds[-1] - seconds[-2]) / (counts[-1] - counts[-2])
    wanted = np.arange(1, most + 1)
    found = np.interp(wanted, counts, seconds) + np.maximum(0.0, wanted - counts[-1]) * slope
    return ThroughputCurve(tuple(float(each) for each in found))


def lmsys_lengths(samples: int, seed: int, *, group: int = 1, alike: float = 0.0) -> list[int]:
    """Draw log-normal lengths with the published median and 95th percentile, cut at the limit.

    Of `group` samples in a row, those of one prompt, the share `alike` of the variance is common.
    """
    sigma = math.log(LMSYS_P95 / LMSYS_MEDIAN) / _Z95
    random = np.random.default_rng(seed)
    common = np.repeat(random.standard_normal(-(-samples // group)), group)[:samples]
    own = random.standard_normal(samples)
    drawn = np.exp(math.log(LMSYS_MEDIAN) + sigma * (alike**0.5 * common + (1 - alike) ** 0.5 * own))
    return [int(each) for each in np.clip(drawn, 1, LMSYS_LIMIT)]


def dealt(lengths: Sequence[int], instances: int, group: int = 1) -> dict[str, list[int]]:
    """Lengths to instances in turn, those of one prompt together."""
    loads: dict[str, list[int]] = {f"instance-{n}": [] for n in range(instances)}
    for number, length in enumerate(lengths):
        loads[f"instance-{number // group % instances}"].append(length)
    return loads
