"""Folders that weights may be read from."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.errors import Violation
from services.contracts.errors import InvalidArgument


def check_weight_folder(
    path: str, root: Path | None, *, follow_links: bool = False, field: str = "disk.path"
) -> None:
    """Check that a path is absolute and, if there is a `root`, within it.

    Args:
        path: of a folder with weights.
        root: folder that it has to be in; None: any.
        follow_links: read the file system, and judge by where symbolic links lead.
        field: of the request, which an error names.

    Raises:
        InvalidArgument: it is not; the error names the root.
    """
    if not os.path.isabs(path):
        raise InvalidArgument([Violation(field, f"is {path!r}; must be an absolute path")])
    if root is None:
        return
    plain = os.path.realpath if follow_links else os.path.normpath
    if not Path(plain(path)).is_relative_to(plain(root)):
        raise InvalidArgument([Violation(field, f"is {path!r}; must be in weights_root, {str(root)!r}")])
