"""Package the server's folders inside paceline_server, so that they do not collide with other packages."""

import tomllib
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path("../..")
FOLDERS = ("kernels", "services")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]

setup(
    version=VERSION,
    install_requires=[f"paceline[services]=={VERSION}"],
    packages=[
        "paceline_server",
        *(
            f"paceline_server.{name}"
            for folder in FOLDERS
            for name in find_packages(str(ROOT), include=[folder, f"{folder}.*"])
        ),
    ],
    package_dir={f"paceline_server.{folder}": f"../../{folder}" for folder in FOLDERS},
    package_data={"": ["*.json", "*.yaml", "*/*.json", "*/*.yaml"]},
    # Build outside this folder, which is searched for code.
    options={"build": {"build_base": "../../build/server"}},
)
