"""Write the compressed archives of the pack, several of which are written and unpacked in parallel.

One archive takes a core 13 s to unpack, and a GPU machine is available for only 15 minutes. The bytes depend on the
files alone: order, times, owners and modes are fixed.
"""

from __future__ import annotations

import io
import lzma
import tarfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

_Sized = TypeVar("_Sized")
_FILTERS = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 2}]
"""15 s of processor time for all packages. Preset 6 takes 65 s and saves 3 of 36 MiB. The filter for x86 saves half
of that at no cost."""


def split(files: Sequence[_Sized], count: int, size: Callable[[_Sized], int]) -> list[list[_Sized]]:
    """Split a sequence into at most `count` runs of about equal size; none is empty.

    Neighbours stay together, because files of a folder resemble each other and a compressor sees one archive.
    """
    total = sum(map(size, files))
    found = list[list[_Sized]]()
    before, last = 0, -1
    for each in files:
        # A file belongs to the run that contains its middle.
        place = min(count - 1, (2 * before + size(each)) * count // (2 * total)) if total else 0
        if place != last:
            found.append([])
            last = place
        found[-1].append(each)
        before += size(each)
    return found


def write(path: Path, files: Iterable[tuple[str, bytes]]) -> None:
    """Write a .tar.xz of files, each a path and its content."""
    with (
        lzma.open(path, "wb", filters=_FILTERS) as packed,
        tarfile.open(fileobj=packed, mode="w|") as archive,
    ):
        for name, content in files:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
