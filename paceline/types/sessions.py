"""Samples that call tools: what is a call, what follows it, and the turns of a session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.types.rollouts import TokenIds
from paceline.types.samples import EnvironmentSpan, Logprobs, VersionSpan


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Rules for tool calls: a sample waits for its environment behind such a token, or such a string."""

    call_token_ids: tuple[int, ...] = ()
    """None of them is among the `stop_token_ids`. The model's end-of-sequence token may be one."""
    call_strings: tuple[str, ...] = ()
    """None of them is among the `stop` strings, and both together have their limits."""
    max_calls: int = 0
    """Most calls of a sample: one more ends it as TRUNCATED. 0: as many as the gateway allows."""
    max_wait: float | None = None
    """Seconds that a sample waits for its environment; then it ends as ABORTED. None: as the gateway says."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """Answer to a tool call of a sample: tokens of its environment, or the end."""

    prompt_id: str
    slot: int
    position: int
    """Response tokens up to and including the call."""
    token_ids: Sequence[int] | TokenIds = ()
    """[new]; not empty unless `end`."""
    end: bool = False
    """The sample is COMPLETED as it is."""


@dataclass(frozen=True, slots=True, eq=False)
class SampleCall:
    """A tool call of a sample, which waits for tokens of its environment."""

    prompt_id: str
    slot: int
    number: int
    """Calls of the sample so far, this one included."""
    begin: int
    """Position of the first of these tokens in the response."""
    token_ids: TokenIds
    """[new], those since the environment's last ones, or all so far; the last one completes the call."""
    logprobs: Logprobs
    """[new]."""
    version_spans: tuple[VersionSpan, ...]
    environment_spans: tuple[EnvironmentSpan, ...]

    @property
    def position(self) -> int:
        """Response tokens up to and including the call."""
        return self.begin + len(self.token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """Tokens that a session has said since its environment, or at its end."""

    token_ids: TokenIds
    """[new]; the last one completes the call, unless the turn is the last."""
    logprobs: Logprobs
    """[new]."""
    begin: int
    """Position of the first of these tokens in the response."""
    done: bool
    """The session has ended; otherwise it waits for an answer."""
