"""Sampling parameters of verl's requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Self

from paceline import types as t
from paceline.integrations.errors import UnsupportedTrainerError

# Those of other tokens and of the prompt have no place in verl's answers.
_NAMES = {field.name for field in fields(t.SamplingParams)} - {
    "logprobs_mode",
    "top_logprobs",
    "prompt_logprobs",
}
# Not a parameter of sampling: a request that wants none is given none.
_LOGPROBS = "logprobs"
_MODES = {"raw_logprobs": t.LogprobsMode.RAW, "processed_logprobs": t.LogprobsMode.PROCESSED}


@dataclass(frozen=True, slots=True)
class RolloutDefaults:
    """Parameters that the configuration of verl's rollout sets for all requests."""

    prompt_length: int
    response_length: int
    max_model_len: int | None
    """Prompt and response together; None: the model's own length."""
    ignore_eos: bool
    repetition_penalty: float
    logprobs_mode: t.LogprobsMode

    @classmethod
    def read(cls, config: Any) -> Self:
        """Read them off verl's `RolloutConfig`. UnsupportedTrainerError: its logprobs_mode is not supported."""
        mode = config.logprobs_mode or "raw_logprobs"
        if mode not in _MODES:
            raise UnsupportedTrainerError(f"rollout.logprobs_mode={mode}: supported are {', '.join(_MODES)}")
        return cls(
            config.prompt_length,
            config.response_length,
            config.max_model_len,
            config.ignore_eos,
            config.repetition_penalty,
            _MODES[mode],
        )

    def sampling(self, given: Mapping[str, Any], prompt_tokens: int) -> t.SamplingParams:
        """Return the sampling parameters of a request whose prompt has so many tokens.

        Raises:
            UnsupportedTrainerError: a parameter is no field of `SamplingParams`, or the prompt leaves no room.
        """
        wanted = {name: value for name, value in given.items() if value is not None and name != _LOGPROBS}
        most = wanted.pop("max_new_tokens", None)
        most = wanted.pop("max_tokens", most)
        if unknown := sorted(wanted.keys() - _NAMES):
            raise UnsupportedTrainerError(f"sampling_params has {', '.join(unknown)}, which is not supported")
        if isinstance(stop := wanted.get("stop"), str):
            wanted["stop"] = [stop]
        if "top_k" in wanted:
            # -1 is verl's word for off.
            wanted["top_k"] = max(wanted["top_k"], 0)
        wanted = {name: tuple(value) if isinstance(value, list) else value for name, value in wanted.items()}
        wanted.setdefault("ignore_eos", self.ignore_eos)
        wanted.setdefault("repetition_penalty", self.repetition_penalty)
        return t.SamplingParams(
            **wanted, max_tokens=self._most_tokens(most, prompt_tokens), logprobs_mode=self.logprobs_mode
        )

    def _most_tokens(self, wanted: int | None, prompt_tokens: int) -> int:
        """Return the most response tokens: those wanted, or what verl's budget of a conversation leaves."""
        if wanted is None:
            left = self.prompt_length + self.response_length - prompt_tokens
            wanted = min(self.response_length, left)
        room = None if self.max_model_len is None else self.max_model_len - prompt_tokens
        if room is not None and room < 1:
            raise UnsupportedTrainerError(
                f"a prompt of {prompt_tokens} tokens leaves no room: max_model_len is {self.max_model_len}"
            )
        return max(1, wanted if room is None else min(wanted, room))


def wants_logprobs(given: Mapping[str, Any]) -> bool:
    """Return True if a request asks for log-probabilities: by a flag, or by a number, which may be 0."""
    value = given.get(_LOGPROBS)
    return value is not None and value is not False
