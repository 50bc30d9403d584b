"""What an engine refuses, and what it could not sample, as the field at fault."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import structlog
from vllm.exceptions import VLLMValidationError

from paceline.errors import Violation
from services.contracts.errors import DataLoss, InvalidArgument, ServiceError
from services.contracts.sampling import ModelLimits, Sampling
from services.generation.engine.grammars import grammars_of

_log = structlog.get_logger(__name__)

WRONG_VALUES = (VLLMValidationError, ValueError, TypeError, ArithmeticError, LookupError)
"""What is raised for a value that an engine cannot use, rather than for an engine that cannot go on."""
_NAMES = tuple(each.name for each in fields(Sampling))


def refused(error: Exception) -> InvalidArgument:
    """Return the refusal of a sample that vLLM did not take, by the parameter that it names."""
    message = str(error).strip()
    named = str(getattr(error, "parameter", None) or message.split(maxsplit=1)[0] if message else "")
    field = f"sampling.{named}" if named in _NAMES else "sampling"
    return InvalidArgument([Violation(field, f"the engine refused it: {message or type(error).__name__}")])


def unsampled(folder: Path, limits: ModelLimits, sampling: Sampling, response: Sequence[int]) -> ServiceError:
    """Return why nothing could be sampled behind a response: its grammar leaves no token, or the model fails."""
    place = f"at response position {len(response)}"
    if sampling.json_schema and _is_at_a_dead_end(folder, limits, sampling, response):
        fault = f"allows no token of the model's vocabulary {place}"
        return InvalidArgument([Violation("sampling.json_schema", fault)])
    return DataLoss(f"the model gives no finite logits {place}")


def _is_at_a_dead_end(folder: Path, limits: ModelLimits, sampling: Sampling, response: Sequence[int]) -> bool:
    try:
        grammars = grammars_of(folder, limits.vocab_size)
        return grammars.allows_nothing(sampling.json_schema, response, sorted(sampling.stops(limits)))
    except Exception:
        # The engine's thread asks, of one sample that has failed already: the others go on.
        _log.exception("grammar_failed")
        return False
