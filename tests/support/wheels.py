"""Wheels of a checkout, and virtual environments with them beside the packages that the tests have."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = {".": "paceline", "deploy/server": "paceline_server"}
"""Folder with a pyproject.toml, and the one name that its wheel may install."""
_COPIED = ("LICENSE", "README.md", "pyproject.toml", "deploy/server", "kernels", "paceline", "services")
_BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"


def build_wheels(folder: Path) -> dict[str, Path]:
    """Return the wheel of each source, built from a copy so that nothing is left in the checkout."""
    copy = folder / "source"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
    for name in _COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=ignored)
        else:
            copy.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    # Of an earlier build: a user who updates a checkout has such a folder.
    (copy / "build/lib/services").mkdir(parents=True)
    (copy / "build/lib/services/__init__.py").touch()
    wheels = {}
    for source in SOURCES:
        out = folder / f"wheel-{SOURCES[source]}"
        command = [sys.executable, "-c", _BUILD, str(out)]
        subprocess.run(command, cwd=copy / source, check=True, capture_output=True)
        (wheels[source],) = out.glob("*.whl")
    return wheels


def uv() -> str | None:
    """Return the program, None if it is not here."""
    own = ROOT / ".venv.uv/bin/uv"
    return str(own) if own.exists() else shutil.which("uv")


class Environment:
    """A virtual environment whose other packages are those of this one, without the checkout."""

    def __init__(self, folder: Path) -> None:
        command = [sys.executable, "-m", "venv", "--without-pip", str(folder)]
        subprocess.run(command, check=True)
        self.folder = folder
        (self.packages,) = folder.glob("lib/python*/site-packages")
        # Its lines that lead to the checkout are not read from there.
        (self.packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def install(self, *what: str | Path, options: Iterable[str] = ("--offline", "--no-deps")) -> None:
        """Install wheels."""
        program = uv()
        assert program is not None
        python = str(self.folder / "bin/python")
        subprocess.run(
            [program, "pip", "install", "--quiet", *options, "--python", python, *map(str, what)], check=True
        )

    def run(
        self, program: str, *arguments: str, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of its `bin`."""
        left_out = ("PYTHONPATH", "PYTHONSAFEPATH")
        given = {name: value for name, value in os.environ.items() if name not in left_out}
        return subprocess.run(
            [self.folder / "bin" / program, *arguments],
            cwd=cwd,
            env=given | dict(environment or {}),
            capture_output=True,
            text=True,
            check=False,
        )
