"""No process of the platform holds more files, threads or keys of Redis from step to step.

`tests.support.footprint` says what counts as growth. The long form is test_thousand_steps.py, which judges memory
as well: it starts a platform of its own, and so cannot lie in a file that borrows one.
"""

from __future__ import annotations

import math

from services.local import Platform
from tests.e2e.footprint_steps import Trainer, observe
from tests.support.footprint import Limits

STEPS = 24
LIMITS = Limits(memory=math.inf, files=0.3, threads=0.3, keys=3.5)
"""A dozen steps can tell what each leaves of files, threads and keys. They say nothing of memory: caches fill for a
hundred. Redis keeps two keys of a batch for ten minutes, and one of a hint."""


def test_a_few_steps_leave_nothing_behind(platform: Platform) -> None:
    with Trainer(platform, prompts=16, tokens=12) as trainer:
        found = observe(trainer.step, platform, STEPS, lambda record: None)
    assert found.above(LIMITS) == {}
