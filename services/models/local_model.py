"""Find or fetch the model that a user names: a folder, a kept download, or one that a script makes.

`fault_of` says why a folder cannot be served, from its files alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from paceline.errors import CHECKOUT
from paceline.weights.safetensors import INDEX
from services.models.download import WORK, Report, download, present
from services.models.source import CONFIGURATION, ModelError, Source, as_source

_CHECKOUT = Path(__file__).parents[2]
_MADE = {"smollm2": ("scripts/real-model", "runs/models/smollm2")}
"""Models that a script of the repository makes, by name: the script, and the folder that it makes."""


def local_model(name: str, report: Report) -> Path:
    """Return the folder of a model; make or download it if it is missing.

    `report` gets lines of progress. ModelError, OSError.
    """
    folder = Path(name)
    if folder.exists():
        return folder.absolute()
    if name in _MADE:
        return _made(name, report)
    address = as_source(name)
    kept = models_folder() / re.sub(r"[^\w.@-]+", "--", address)
    if present(address, kept) is None:
        report(f"{address} to {kept}")
        download(Source(address), kept, report)
    return kept


def _made(name: str, report: Report) -> Path:
    script, folder = (_CHECKOUT / part for part in _MADE[name])
    if not script.is_file():
        raise ModelError(
            f"{name} is made by {_MADE[name][0]} in {CHECKOUT}, and this installation is not one"
        )
    with subprocess.Popen(
        [str(script)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=_CHECKOUT
    ) as making:
        assert making.stdout is not None
        last = ""
        for line in making.stdout:
            # A progress bar is one line that is redrawn many times.
            if drawn := line.decode(errors="replace").strip().rpartition("\r")[2]:
                last = drawn
                report(last)
    if making.returncode:
        raise ModelError(f"{script} could not make {name}: {last}")
    return folder


def fault_of(folder: Path) -> str:
    """Return what is wrong with a model folder, as a sentence without a full stop; "" if nothing is.

    It reads config.json, the index, and the header of each safetensors file.
    """
    if not folder.exists():
        name = str(folder)
        known = name in _MADE or hub_name(name) is not None
        return f"there is no folder {name}" + (f" (`paceline up --model {name}` fetches it)" if known else "")
    if not folder.is_dir():
        return f"{folder} is a file; name the folder that has config.json and the weights"
    if not (folder / CONFIGURATION).is_file():
        if (folder / WORK).is_dir():
            return f"the download to {folder} is not complete; run `paceline download` again"
        return f"{folder} has no {CONFIGURATION}"
    try:
        _object(folder / CONFIGURATION)
        return _fault_of_weights(folder)
    except (OSError, ValueError) as error:
        return f"{folder} cannot be read: {error}"


def _fault_of_weights(folder: Path) -> str:
    """Return what is wrong with the weights; OSError or ValueError if the index cannot be read."""
    # Imported late: the command line loads this module to show help.
    from safetensors import SafetensorError, safe_open

    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        listed = _object(folder / INDEX).get("weight_map")
        if not isinstance(listed, dict):
            return f"{folder / INDEX} has no weight_map"
        named = sorted(set(map(str, listed.values())))
        if missing := [name for name in named if not (folder / name).is_file()]:
            return f"{folder} lacks {len(missing)} of {len(named)} files of weights, such as {missing[0]}"
        files = [folder / name for name in named]
    elif not files and not any(folder.glob("*.bin")):
        return f"{folder} has no weights: no *.safetensors, and no *.bin"
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except SafetensorError as error:
            return f"{file} is damaged or not complete: {error}"
    return ""


def _object(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. OSError; ValueError: it holds something else."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{path.name} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} is no JSON object")
    return found


def hub_name(name: str) -> str | None:
    """Return the name on the hub, without a revision, that a person gave; None: a folder, or another address."""
    if Path(name).exists():
        return None
    try:
        address = as_source(name)
    except ModelError:
        return None
    return address.removeprefix("hf://").partition("@")[0] if address.startswith("hf://") else None


def models_folder() -> Path:
    """Return the folder in which downloaded models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "models"
