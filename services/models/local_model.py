"""Find or fetch the model that a user names: a folder, a kept download, or one that a script makes."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from paceline.installation import CHECKOUT
from services.models.download import Report, download, present
from services.models.source import Source, SourceError, as_source

_CHECKOUT = Path(__file__).parents[2]
_MADE = {"smollm2": ("scripts/real-model", "runs/models/smollm2")}
"""Models that a script of the repository makes, by name: the script, and the folder that it makes."""


def local_model(name: str, report: Report) -> Path:
    """Return the folder of a model; make or download it if it is missing.

    `report` gets lines of progress. DownloadError, SourceError, OSError.
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
        raise SourceError(
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
        raise SourceError(f"{script} could not make {name}: {last}")
    return folder


def hub_name(name: str) -> str | None:
    """Return the name on the hub, without a revision, that a person gave; None: a folder, or another address."""
    if Path(name).exists():
        return None
    try:
        address = as_source(name)
    except SourceError:
        return None
    return address.removeprefix("hf://").partition("@")[0] if address.startswith("hf://") else None


def models_folder() -> Path:
    """Return the folder in which downloaded models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "models"
