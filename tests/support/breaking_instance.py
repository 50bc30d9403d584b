"""An instance whose engine fails: `python -m tests.support.breaking_instance <flags of services.generation>`.

Everything is the real thing but for one method: the step raises once a sample has `BREAKS_AT` response
tokens, as it would when the device is lost in mid-generation.
"""

from __future__ import annotations

from services.generation.__main__ import serve
from services.generation.config import GenerationConfig
from services.generation.engine.core import Engine
from services.generation.engine.types import SampleStep
from services.platform.service import run
from tests.support.instances import BREAKS_AT

_step = Engine.step


def step(self: Engine) -> list[SampleStep]:
    """As `Engine.step`, until a response is long enough."""
    if any(len(sample.response) >= BREAKS_AT for sample in self.decoding()):
        raise RuntimeError("the device is lost")
    return _step(self)


if __name__ == "__main__":
    Engine.step = step  # type: ignore[method-assign]
    run("generation", serve, GenerationConfig)
