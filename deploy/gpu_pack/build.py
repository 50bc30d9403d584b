"""Build `.pack/`: archives of the packages and of the code, and the script that unpacks them."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from zipfile import ZipFile

from deploy.gpu_pack import archive, contents, fatbin, wheels
from deploy.gpu_pack.contents import Library, Member
from deploy.gpu_pack.wheels import PackError

LIMIT = 45 * 2**20
"""Maximum size of the pack in bytes: a run carries 64 MiB, and the checkout is part of them."""
PACKAGES = ("bench", "kernels", "paceline", "services")
_PARTS = 4
_CARRIED = Path(__file__).parent / "carried"
_LISTING = "contents.json"


@dataclass(frozen=True, slots=True)
class Listing:
    """Contents of a pack: wheels by name and version, libraries, bytes left out by reason, and bytes of each file.

    `keys` identify the inputs of each part. `unpacked` and `files` count the packages.
    """

    keys: dict[str, str]
    packages: list[str]
    libraries: list[Library]
    left_out: dict[str, int]
    files: int
    unpacked: int
    bytes_of: dict[str, int] = field(default_factory=dict)

    @property
    def weight(self) -> int:
        """Bytes of the pack."""
        return sum(self.bytes_of.values())


def build(found: Sequence[Path], root: Path, out: Path) -> Listing:
    """Write a pack of wheels and of the code of a checkout; keep packages that are already there.

    Raises:
        PackError: the pack is heavier than its limit, or a wheel or the checkout is not as expected.
        FatbinError: a library with device code cannot be read.
    """
    out.mkdir(parents=True, exist_ok=True)
    key = _site_key(found)
    listing = _earlier(out, key)
    if listing is None:
        # An interrupted build must not leave a pack that looks complete.
        (out / _LISTING).unlink(missing_ok=True)
        for path in out.glob("site-*"):
            path.unlink()
        listing = _write_site(found, key, out)
    listing.keys["code"] = _write_code(root, out)
    for path in sorted(_CARRIED.iterdir()):
        if path.is_file():
            shutil.copyfile(path, out / path.name)
    sizes = {path.name: path.stat().st_size for path in sorted(out.iterdir()) if path.name != _LISTING}
    listing.bytes_of.clear()
    listing.bytes_of.update(sizes)
    (out / _LISTING).write_text(json.dumps(asdict(listing), indent=1) + "\n")
    if listing.weight > LIMIT:
        raise PackError(
            f"{out}: {listing.weight / 2**20:.1f} MiB, {LIMIT / 2**20:.0f} allowed. Leave out more (LEFT_OUT in"
            " deploy/gpu_pack/contents.py), or take a higher preset (deploy/gpu_pack/archive.py)"
        )
    return listing


def read(out: Path) -> Listing:
    """Return the listing of the pack in a folder."""
    said: dict[str, Any] = json.loads((out / _LISTING).read_text())
    libraries = [
        Library(each["target"], each["size"], fatbin.Pruned(**each["code"])) for each in said["libraries"]
    ]
    return Listing(**{**said, "libraries": libraries})


def _site_key(found: Sequence[Path]) -> str:
    """Return the key of a pack's packages: a hash of the wheels and of the modules that choose and shrink files."""
    digest = hashlib.sha256()
    for path in sorted(found):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
    for module in (archive, contents, fatbin):
        digest.update(Path(str(module.__file__)).read_bytes())
    return digest.hexdigest()[:12]


def _earlier(out: Path, key: str) -> Listing | None:
    """Return the listing of an earlier call, if its packages have this key and are complete."""
    try:
        listing = read(out)
    except (FileNotFoundError, ValueError, TypeError, KeyError):
        return None
    sizes = {path.name: path.stat().st_size for path in out.glob("site-*")}
    whole = sizes == {name: size for name, size in listing.bytes_of.items() if name.startswith("site-")}
    return listing if whole and listing.keys["site"] == key else None


def _write_site(found: Sequence[Path], key: str, out: Path) -> Listing:
    every = list(contents.members(found))
    carried = sorted((each for each in every if not each.reason), key=lambda each: each.target)
    parts = archive.split(carried, _PARTS, lambda each: each.size)
    names = [out / f"site-{number}.tar.xz" for number in range(len(parts))]
    # Compressing releases the interpreter's lock. The threads take turns for the little work that does not.
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        libraries = [each for made in pool.map(_write_part, names, parts) for each in made]
    left_out: dict[str, int] = {}
    for each in every:
        if each.reason:
            left_out[each.reason] = left_out.get(each.reason, 0) + each.size
    packages = ["==".join(path.name.split("-")[:2]) for path in found]
    unpacked = sum(each.size for each in carried)
    return Listing({"site": key}, packages, libraries, left_out, len(carried), unpacked)


def _write_part(path: Path, part: Sequence[Member]) -> list[Library]:
    libraries = list[Library]()
    with ExitStack() as opened:
        # Open each wheel once, because opening reads its list of files, thousands for vLLM.
        zips = {wheel: opened.enter_context(ZipFile(wheel)) for wheel in {each.wheel for each in part}}

        def files() -> Iterator[tuple[str, bytes]]:
            for each in part:
                data, library = contents.shrunk(each.target, zips[each.wheel].read(each.name))
                if library is not None:
                    libraries.append(library)
                yield each.target, data

        archive.write(path, files())
    return libraries


def _write_code(root: Path, out: Path) -> str:
    """Write the code of a checkout and return its key.

    The code is the working tree, with uncommitted edits and new files that git does not ignore. A run that carries
    the checkout uses the checkout (start.sh); the copy, about 1 MiB, serves a machine that gets the pack alone.
    """
    listed = subprocess.run(
        ["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *PACKAGES],
        capture_output=True,
        text=True,
        check=False,
    )
    names = sorted(name for name in listed.stdout.split("\0") if name and (root / name).is_file())
    if not names:
        raise PackError(f"{root}: git lists no code of {', '.join(PACKAGES)}. {listed.stderr.strip()}")
    path = out / "code-0.tar.xz"
    archive.write(path, ((name, (root / name).read_bytes()) for name in names))
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:12]


def collect(lock: Path = wheels.LOCK) -> list[Path]:
    """Return the wheels of the lock; download missing ones."""
    return wheels.collect(wheels.read(lock), wheels.CACHE)
