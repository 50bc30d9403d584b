"""Registry of the draft models of an engine. Pure: imports neither vLLM nor torch.

The registry of drafters (services/contracts/drafters.py) has a drafter of the same name for each. A draft model is
a line here, its class in a worker, a field of `EngineOptions`, and its rules in model_support.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

from services.generation.engine.model_support import Feature
from services.generation.engine.types import EAGLE3, QUANTIZED, Eagle3Options, EngineOptions, W4Options


@dataclass(frozen=True, slots=True)
class DraftModelKind:
    """A draft model by the name of its drafter, which is also its feature and its field of `EngineOptions`.

    `place` is its class in a worker, a `DraftModel` that is made from the model runner and its `options`. Its
    memory sleeps with the target's weights if it is `among_weights`. With `copies_target` it is built before other
    draft models, which add to the target's layers.
    """

    name: str
    words: str
    place: str
    options: type[Any]
    among_weights: bool = False
    copies_target: bool = False

    @property
    def key(self) -> str:
        """Key in vLLM's additional_config for the fields of the options, if the draft model is wanted."""
        return f"paceline_{self.name}"

    @property
    def feature(self) -> Feature:
        """Feature that a model may not allow."""
        return Feature(self.name)

    def build(self, runner: Any, fields: Mapping[str, Any]) -> Any:
        """Return the draft model of a worker, from the fields of its options."""
        return resolve_name(self.place)(runner, self.options(**fields))


_ENGINE = "services.generation.engine"
KINDS = (
    DraftModelKind(
        EAGLE3, "the EAGLE-3 head", f"{_ENGINE}.draft_models.eagle3:Eagle3", Eagle3Options, among_weights=True
    ),
    DraftModelKind(
        QUANTIZED,
        "the quantized copy",
        f"{_ENGINE}.experiments.quantized:QuantizedSelfDraft",
        W4Options,
        copies_target=True,
    ),
)
"""Draft models in the order of their cost per token."""


def wanted(options: EngineOptions) -> dict[DraftModelKind, Any]:
    """Return the draft models that an engine should have, with the options of each."""
    found = {kind: getattr(options, kind.name) for kind in KINDS}
    return {kind: own for kind, own in found.items() if own is not None}
