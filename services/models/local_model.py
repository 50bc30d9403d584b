"""Models that a person names on this machine: folders, or what is downloaded once and kept."""

from __future__ import annotations

import os
import re
from pathlib import Path

from services.models.download import download, present
from services.models.progress import Report
from services.models.source import Source, as_source


def local_model(name: str, report: Report) -> Path:
    """Return the folder of a model: the one that is named, or one of the cache, downloaded if it is not there.

    `report` gets lines of progress. DownloadError, SourceError, OSError.
    """
    folder = Path(name)
    if folder.exists():
        return folder.absolute()
    address = as_source(name)
    kept = models_folder() / re.sub(r"[^\w.@-]+", "--", address)
    if present(address, kept) is None:
        report(f"{address} to {kept}")
        download(Source(address), kept, report)
    return kept


def models_folder() -> Path:
    """Return the folder in which downloaded models are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline" / "models"
