"""Unpack a part of .pack and print the folder: `python3 .pack/unpack.py site HOME`.

The part `site` is the packages, `code` is Paceline. The folder's name has the key of the pack, so that
one which was unpacked before is used again, and never an older one. Needs nothing but Python 3.12; runs
where nothing is installed.
"""

from __future__ import annotations

import json
import os
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

PACK = Path(__file__).parent


def main() -> None:
    """Unpack what is not there yet; times go to the error output, where they disturb nobody."""
    part, home = sys.argv[1], Path(sys.argv[2])
    key = json.loads((PACK / "contents.json").read_text())["keys"][part]
    folder = home / f"{part}-{key}"
    if not folder.exists():
        began = time.monotonic()
        archives = sorted(PACK.glob(f"{part}-*.tar.xz"))
        home.mkdir(parents=True, exist_ok=True)
        # Only a whole folder gets the name: the run may be ended while it unpacks.
        making = tempfile.mkdtemp(prefix=f"{part}-", dir=home)
        with ProcessPoolExecutor(len(archives)) as pool:
            for _ in pool.map(extract, archives, [making] * len(archives)):
                pass
        os.rename(making, folder)
        print(f"{folder}: unpacked in {time.monotonic() - began:.1f} s", file=sys.stderr)
    print(folder)


def extract(archive: Path, folder: str) -> None:
    """Unpack an archive into a folder, which others are unpacked into at the same time."""
    with tarfile.open(archive) as packed:
        for member in packed:
            # tarfile fails where another process has made the folder in the same moment.
            Path(folder, member.name).parent.mkdir(parents=True, exist_ok=True)
            packed.extract(member, folder, filter="data")


if __name__ == "__main__":
    main()
