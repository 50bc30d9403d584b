"""Pack what a GPU machine without network lacks: vLLM with its CUDA kernels, its packages, and this code.

    scripts/gpu-pack                 # build .pack/, or update it
    scripts/gpu-pack --lock          # take versions from requirements/cuda.lock and hashes from the registry

The machine has Python 3.12, torch 2.11 for CUDA 13, Triton 3.6, an H100 or H200, and no network. On it, in the
folder that holds `.pack`, run:

    . .pack/start.sh && python3 -m bench.gpu --brief

git ignores `.pack`. The pack has the files of the wheels that a Hopper GPU loads (deploy/gpu_pack/contents.py), and
of their libraries the device code for sm_90 (deploy/gpu_pack/fatbin.py). Wheels are kept in runs/gpu-pack, and a
second build downloads nothing.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.report import console, show_rows
from deploy.gpu_pack import wheels
from deploy.gpu_pack.build import LIMIT, Listing, build, collect
from deploy.gpu_pack.fatbin import FatbinError
from deploy.gpu_pack.wheels import PackError


def main() -> None:
    """Run the command; the exit status is 1 if there is no usable pack."""
    given = arguments()
    began = time.monotonic()
    try:
        if given.lock:
            versions = wheels.versions_of(wheels.VERSIONS)
            text = wheels.relock(wheels.read(wheels.LOCK), versions, wheels.CACHE)
            wheels.LOCK.write_text(text)
            return
        listing = build(collect(), Path(), given.out)
    except (FatbinError, PackError) as error:
        print(f"gpu-pack: {error}", file=sys.stderr)
        sys.exit(1)
    show(listing, given.out, time.monotonic() - began)


def show(listing: Listing, out: Path, seconds: float) -> None:
    """Print the contents and the size of a pack."""
    show_rows(
        "Libraries with device code, MB",
        ("library", "file", "kept for sm_90", "dropped"),
        [
            (each.target, _mb(each.size), _mb(each.code.kept), _mb(each.code.dropped))
            for each in listing.libraries
        ],
    )
    dropped = sorted(listing.left_out.items(), key=lambda each: -each[1])
    show_rows("Left out, MB", ("files", "unpacked"), [(reason, _mb(size)) for reason, size in dropped])
    show_rows(
        f"{out}, MiB", ("file", "size"), [(name, _mib(size)) for name, size in listing.bytes_of.items()]
    )
    console().print(
        f"gpu-pack: {len(listing.packages)} wheels, {listing.files} files, {_mb(listing.unpacked)} MB unpacked;"
        f" {out} weighs {_mib(listing.weight)} MiB of at most {_mib(LIMIT)}; {seconds:.0f} s",
        highlight=False,
    )


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f}"


def _mib(size: int) -> str:
    return f"{size / 2**20:.2f}"


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(".pack"), help="folder of the pack")
    parser.add_argument("--lock", action="store_true", help="build nothing; write requirements/gpu-pack.lock")
    return parser.parse_args(given)


if __name__ == "__main__":
    main()
