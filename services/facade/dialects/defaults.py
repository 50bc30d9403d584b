"""Sampling parameters that a model's folder recommends, in `generation_config.json`, for requests without."""

from __future__ import annotations

from pathlib import Path

from paceline.foreign_json import read_object

FILE = "generation_config.json"
NAMES = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)
"""Parameters that vLLM's server takes from the file."""


def model_defaults(folder: Path) -> dict[str, float]:
    """Return the sampling parameters in a model's folder, by vLLM's names; none if it has no such file.

    `do_sample` has no effect, as in vLLM; nor has `max_new_tokens`, which vLLM takes for the most response tokens.

    ValueError: the file is no JSON object, or a parameter is no number. OSError: it cannot be read.
    """
    try:
        found = read_object(folder / FILE)
    except FileNotFoundError:
        return {}
    named = {name: found[name] for name in NAMES if found.get(name) is not None}
    for name, value in named.items():
        if isinstance(value, bool) or not isinstance(value, int if name == "top_k" else int | float):
            raise ValueError(f"{name} is {value!r}; must be a number")
    return named
