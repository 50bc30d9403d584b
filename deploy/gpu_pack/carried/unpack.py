"""Unpack a part of .pack and print the folder: `python3 .pack/unpack.py site HOME`.

The part `site` has the packages, `code` has Paceline. The folder's name contains the key of the pack, so that an
unpacked folder is reused, and never one of an older pack. Needs nothing but Python 3.12, because it runs before
anything is installed.
"""

from __future__ import annotations

import compileall
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
    """Unpack the part if it is missing. Times go to stderr, because stdout has the folder."""
    part, home = sys.argv[1], Path(sys.argv[2])
    key = json.loads((PACK / "contents.json").read_text())["keys"][part]
    folder = home / f"{part}-{key}"
    if not folder.exists():
        began = time.monotonic()
        archives = sorted(PACK.glob(f"{part}-*.tar.xz"))
        home.mkdir(parents=True, exist_ok=True)
        # Only a complete folder gets the name, because the run may be ended while it unpacks.
        making = tempfile.mkdtemp(prefix=f"{part}-", dir=home)
        with ProcessPoolExecutor(len(archives)) as pool:
            for _ in pool.map(extract, archives, [making] * len(archives)):
                pass
        os.rename(making, folder)
        # Else the first process that imports vLLM would compile for some seconds, on one core.
        compileall.compile_dir(folder, quiet=2, workers=0)
        print(f"{folder}: unpacked in {time.monotonic() - began:.1f} s", file=sys.stderr)
    print(folder)


def extract(archive: Path, folder: str) -> None:
    """Unpack an archive into a folder, into which other archives are unpacked at the same time."""
    with tarfile.open(archive) as packed:
        for member in packed:
            # tarfile fails if another process creates the folder at the same moment.
            Path(folder, member.name).parent.mkdir(parents=True, exist_ok=True)
            packed.extract(member, folder, filter="data")


if __name__ == "__main__":
    main()
