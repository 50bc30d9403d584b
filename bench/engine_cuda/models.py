"""The model of a run: given with its weights, or of random ones."""

from __future__ import annotations

from pathlib import Path

from bench.random_model import make_random_model, make_random_weights

_VOCABULARY, _LENGTH = 151_936, 32_768


def model_folder(given: Path | None, made: Path, *, tiny: bool) -> Path:
    """Return the folder of a model with weights; random ones are made once, under `made`."""
    if given is not None and any(given.glob("*.safetensors")):
        return given
    if (made / "config.json").is_file() and any(made.glob("*.safetensors")):
        return made
    if given is not None:
        return make_random_weights(given, made)
    if tiny:
        return make_random_model(made, hidden=128, layers=2, vocab_size=512, length=1024)
    return make_random_model(made, hidden=1024, layers=24, vocab_size=_VOCABULARY, length=_LENGTH)
