"""A trainer that is not written in Python: examples/node against a real gateway."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from services.contracts.seeds import sample_seed
from tests.integration.gateway.conftest import CALL, Cluster
from tests.support.fake_instance import response_of

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/node"
INSTALL_SECONDS = 120


@pytest.fixture(scope="module")
def node_modules() -> Path:
    """Packages of the example's lock, installed once for each lock."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("needs Node.js and npm")
    lock = (EXAMPLE / "package-lock.json").read_bytes()
    place = ROOT / ".tools/node" / hashlib.sha256(lock).hexdigest()[:16]
    place.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{place}.lock"):
        if not (place / "installed").exists():
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir()
            for name in ("package.json", "package-lock.json"):
                shutil.copy(EXAMPLE / name, place)
            try:
                subprocess.run(
                    ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"],
                    cwd=place,
                    check=True,
                    timeout=INSTALL_SECONDS,
                    capture_output=True,
                )
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
                pytest.skip(f"npm cannot install the example's packages here: {error}")
            (place / "installed").touch()
    return place / "node_modules"


@pytest.mark.timeout(300)
async def test_a_step_and_a_push_from_node(cluster: Cluster, node_modules: Path, tmp_path: Path) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    process = await asyncio.create_subprocess_exec(
        "node",
        str(EXAMPLE / "trainer.js"),
        gateway.gateway.address,
        "node-run",
        str(tmp_path),
        env=os.environ | {"NODE_PATH": str(node_modules)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(CALL):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    *samples, published = map(json.loads, out.decode().splitlines())
    keys = [(each["prompt_id"], each["slot"]) for each in samples]
    assert sorted(keys) == [(prompt, slot) for prompt in ("p0", "p1") for slot in range(2)]
    for each in samples:
        seed = sample_seed(7, 0, each["prompt_id"], each["slot"])
        tokens, logprobs = response_of(seed, 0, 16, False)
        assert each["token_ids"] == tokens
        assert each["logprobs"] == pytest.approx(logprobs)
    assert published == {"policy_version": "1"}
    assert gateway.gateway.leadership.leading().book.version == 1
