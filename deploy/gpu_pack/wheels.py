"""Collect the wheels of requirements/gpu-pack.lock, for CPython 3.12 on x86-64, on any machine.

The lock has one wheel for each package that the GPU machine lacks, and its hash. Its versions are the versions in
requirements/cuda.lock, so that the pack runs the same packages as the CUDA images; `relock` takes them from there.
To add a package, write its name into the lock and run `scripts/gpu-pack --lock`.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LOCK = Path("requirements/gpu-pack.lock")
VERSIONS = Path("requirements/cuda.lock")
CACHE = Path("runs/gpu-pack/wheels")
PIP = Path(".venv.uv/bin/python")
"""Python of the environment that scripts/setup creates first; uv itself does not download wheels."""
_HEAD = """\
# Wheels that scripts/gpu-pack brings to a GPU machine without network. Names are chosen by hand: vLLM, and what it
# and the services import that the machine lacks (requirements/gpu-machine.txt is what it has). scripts/gpu-pack
# --lock takes the versions from cuda.lock and writes the hashes.
"""
_PIN = re.compile(r"([A-Za-z0-9._-]+)(?:==([^\s\\]+)(?: --hash=sha256:([0-9a-f]{64}))?)?")


class PackError(Exception):
    """A pack that cannot be built; the message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class Pin:
    """A package of the lock. A name just added has neither version nor hash."""

    name: str
    version: str = ""
    sha256: str = ""

    def __str__(self) -> str:
        """Return the line of a requirements file."""
        return f"{self.name}=={self.version}" + (f" --hash=sha256:{self.sha256}" if self.sha256 else "")


def read(path: Path) -> list[Pin]:
    """Return the packages of a lock. PackError for a line that names none."""
    found = list[Pin]()
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line or line.lstrip().startswith("#"):
            continue
        match = _PIN.fullmatch(line)
        if match is None:
            raise PackError(f"{path}:{number}: expected NAME==VERSION --hash=sha256:DIGEST, not {line!r}")
        found.append(Pin(*(part or "" for part in match.groups())))
    return found


def collect(pins: Sequence[Pin], folder: Path) -> list[Path]:
    """Return the wheels of a lock, in its order; download wheels that are not in the folder.

    Raises:
        PackError: a pin without hash, or a wheel that the registry does not have.
    """
    if unlocked := [pin.name for pin in pins if not pin.sha256]:
        raise PackError(f"{LOCK}: no hash of {', '.join(unlocked)}; run scripts/gpu-pack --lock")
    at_hand = _by_digest(folder)
    if missing := [pin for pin in pins if pin.sha256 not in at_hand]:
        _download(missing, folder)
        at_hand = _by_digest(folder)
    return [at_hand[pin.sha256] for pin in pins]


def relock(pins: Iterable[Pin], versions: Mapping[str, str], folder: Path) -> str:
    """Return the text of a lock with the same names, the given versions, and the registry's hashes."""
    names = sorted(pin.name for pin in pins)
    if unknown := [name for name in names if name not in versions]:
        raise PackError(f"{VERSIONS}: has no {', '.join(unknown)}")
    wanted = [Pin(name, versions[name]) for name in names]
    _download(wanted, folder)
    digests = {_package(path): digest for digest, path in _by_digest(folder).items()}
    return _HEAD + "".join(
        f"{Pin(pin.name, pin.version, digests[pin.name, pin.version])}\n" for pin in wanted
    )


def versions_of(path: Path) -> dict[str, str]:
    """Return the versions in a lock by name."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", path.read_text(), re.MULTILINE))


def _download(pins: Sequence[Pin], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", suffix=".txt") as wanted:
        wanted.write("".join(f"{pin}\n" for pin in pins))
        wanted.flush()
        options = ["-qq", "--no-deps", "--only-binary=:all:", "--implementation=cp", "--python-version=3.12"]
        places = [f"--dest={folder}", f"--requirement={wanted.name}"]
        ended = subprocess.run(
            [str(PIP), "-m", "pip", "download", *options, *_platforms(), *places],
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    if ended.returncode:
        raise PackError(f"pip downloads no wheel of {', '.join(pin.name for pin in pins)}:\n{ended.stderr}")


def _platforms() -> list[str]:
    # pip takes a platform literally: manylinux_2_28 does not include earlier ones.
    tags = ["linux", "manylinux1", "manylinux2010", "manylinux2014"]
    tags += [f"manylinux_2_{minor}" for minor in range(5, 40)]
    return [f"--platform={tag}_x86_64" for tag in tags]


def _by_digest(folder: Path) -> dict[str, Path]:
    return {_digest(path): path for path in sorted(folder.glob("*.whl"))}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _package(path: Path) -> tuple[str, str]:
    name, version, *_ = path.name.split("-")
    return re.sub(r"[-_.]+", "-", name).lower(), version
