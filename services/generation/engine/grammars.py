"""Grammars of JSON schemas: masks of the tokens that may follow, position by position.

The state of a grammar is a function of the response so far. The worker keeps it, and catches up with the response
when the sampler needs a mask, so it is never moved, resumed or stored. vLLM's own structured outputs keep it in
the scheduler and mask the logits before the sampler gets them, which would lose the log-probabilities of the
model's own distribution, and responses that begin elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import structlog
import torch
import xgrammar

from services.contracts.sampling import ModelLimits, Sampling
from services.contracts.schemas import schema_faults
from services.generation.engine.text import vocabulary_of

_log = structlog.get_logger(__name__)

# Memory of the cache of compiled grammars.
_CACHE_BYTES = 256 << 20
_PLACE_IN_XGRAMMAR = re.compile(r"^\[[0-9:]+\] \S+: ")
_CONTROL = frozenset(range(32)) - frozenset(b"\n\r")


class GrammarState:
    """Grammar of one sample, advanced by the part of its response that has been read."""

    __slots__ = ("_matcher", "_read")

    def __init__(self, matcher: Any | None) -> None:
        """Wrap a matcher of xgrammar; with None no token may follow."""
        self._matcher = matcher
        self._read = 0

    def fill(self, response: Sequence[int], drafts: Sequence[int], masks: torch.Tensor, first: int) -> None:
        """Write the masks of the rows after a response and after each of its drafts, from row `first` on.

        Rows after a draft that the grammar refuses are not written, because they are never sampled from.
        """
        for token in response[self._read :]:
            if self._matcher is not None and not self._matcher.accept_token(int(token)):
                self._matcher = None
        self._read = len(response)
        if (matcher := self._matcher) is None:
            masks[first] = 0
            return
        taken = 0
        for row, draft in enumerate([*drafts, None]):
            if matcher.is_terminated():
                break
            matcher.fill_next_token_bitmask(masks, first + row)
            if draft is None or not matcher.accept_token(int(draft)):
                break
            taken += 1
        if taken:
            matcher.rollback(taken)


class Grammars:
    """Grammars over one model's tokens. Thread-safe."""

    def __init__(self, vocabulary: Any) -> None:
        """Compile for a vocabulary of xgrammar's."""
        self._size = vocabulary.vocab_size
        self._compiler = xgrammar.GrammarCompiler(
            _without_control_characters(vocabulary), max_threads=1, cache_limit_bytes=_CACHE_BYTES
        )

    def check(self, schema: str, prefix: Sequence[int], stops: Sequence[int]) -> str:
        """Return why a schema cannot be served, or cannot continue the prefix of a response; "" if it can."""
        if faults := schema_faults(schema):
            return "; ".join(faults)
        try:
            matcher = self._matcher(schema, stops)
        except Exception as error:
            return (
                f"is not a schema that can be served: {_PLACE_IN_XGRAMMAR.sub('', str(error)).strip()[:200]}"
            )
        if not all(matcher.accept_token(int(token)) for token in prefix):
            return "does not allow the tokens of the prefix"
        if not matcher.is_terminated() and not self._allows_any(matcher):
            behind = "behind the prefix" if prefix else "at first"
            return f"allows no token of the model's vocabulary {behind}"
        return ""

    def allows_nothing(self, schema: str, response: Sequence[int], stops: Sequence[int]) -> bool:
        """Return True if no token may follow a response that a schema has allowed so far."""
        matcher = self._matcher(schema, stops)
        return all(matcher.accept_token(int(token)) for token in response) and not self._allows_any(matcher)

    def _allows_any(self, matcher: Any) -> bool:
        mask = masks_for(1, self._size)
        matcher.fill_next_token_bitmask(mask)
        return bool(mask.any())

    def begin(self, schema: str, stops: Sequence[int]) -> GrammarState:
        """Return the grammar of a sample whose response is empty so far."""
        try:
            return GrammarState(self._matcher(schema, stops))
        except Exception:
            # The schema was checked before. This must not fail the step, which samples for others, too.
            _log.exception("grammar_failed")
            return GrammarState(None)

    def _matcher(self, schema: str, stops: Sequence[int]) -> Any:
        compiled = self._compiler.compile_json_schema(schema)
        return xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stops))


@lru_cache(maxsize=1)
def grammars_of(folder: Path, vocab_size: int) -> Grammars:
    """Return the grammars of a model in this process. ValueError if its tokens have no text."""
    vocabulary = vocabulary_of(folder, vocab_size)
    if vocabulary is None:
        raise ValueError("a JSON schema needs the text of tokens, and this model has no tokenizer")
    return Grammars(vocabulary)


def masks_for(rows: int, vocab_size: int) -> torch.Tensor:
    """Return masks that allow everything, in xgrammar's form, for `rows` rows."""
    return xgrammar.allocate_token_bitmask(rows, vocab_size)


def apply_masks(logits: torch.Tensor, masks: torch.Tensor, rows: list[int]) -> None:
    """Mask some rows of logits, [R, V] float32, in place; `masks` has an entry for every row."""
    xgrammar.apply_token_bitmask_inplace(logits, masks.to(logits.device), indices=rows)


def schema_fault(folder: Path, limits: ModelLimits, sampling: Sampling, prefix: Sequence[int]) -> str:
    """Return why the schema of a sample with this response so far cannot be served; "" if it can.

    The schema is compiled afterwards.
    """
    stops = sorted(sampling.stops(limits))
    return grammars_of(folder, limits.vocab_size).check(sampling.json_schema, prefix, stops)


def _without_control_characters(vocabulary: Any) -> Any:
    """Return a vocabulary without the tokens that contain control characters other than line ends.

    Strings with a length or a pattern in the schema would contain them unescaped, which is not valid JSON.
    """
    tokens = [b"" if _CONTROL.intersection(each) else each for each in vocabulary.decoded_vocab]
    return xgrammar.TokenizerInfo(
        tokens,
        vocab_type=xgrammar.VocabType.RAW,
        vocab_size=vocabulary.vocab_size,
        stop_token_ids=vocabulary.stop_token_ids,
        add_prefix_space=vocabulary.add_prefix_space,
    )
