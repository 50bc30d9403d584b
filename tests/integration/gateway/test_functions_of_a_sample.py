"""How many functions one sample enters, in the SDK and in the gateway: what a reader follows to understand it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import paceline
from paceline import AsyncClient, Group, SamplingParams
from tests.integration.gateway.conftest import Cluster

_ROOT = Path(paceline.__file__).parents[1]
_COLUMNS = "paceline/columns.py"
_MOST = {"paceline": 75, _COLUMNS: 15, "services/gateway": 300}
"""Bounds of the functions of one sample. A change that needs more has to be worth a reader's time.

The gateway's loop also does periodic work, which adds up to 20 functions if it falls into the time of the sample.
"""


@contextmanager
def entered() -> Iterator[set[CodeType]]:
    """Collect the functions that this thread enters."""
    found: set[CodeType] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found.add(frame.f_code)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def functions(found: set[CodeType], folder: str) -> list[str]:
    """Return the functions of a folder by file, without generated stubs and generator expressions."""
    names = []
    for code in found:
        path = Path(code.co_filename)
        if (
            path.is_relative_to(_ROOT / folder)
            # The record of tokens counts once, for the SDK and the gateway together.
            and (folder == _COLUMNS or path != _ROOT / _COLUMNS)
            and "_pb2" not in path.name
            and not code.co_name.startswith("<")
        ):
            names.append(f"{path.relative_to(_ROOT)}:{code.co_qualname}")
    return sorted(set(names))


async def test_a_sample_enters_few_functions(cluster: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    gateway = await cluster.gateway()
    await cluster.instance("i0")
    await cluster.serving(gateway, 1)
    async with AsyncClient(gateway.gateway.address, token="") as client:
        run = client.run("run", seed=7)

        async def sample(step: int) -> int:
            rollout = await run.rollout(
                step, [Group("p", (1, 2, 3), samples=1)], sampling=SamplingParams(max_tokens=40)
            )
            return len([each async for each in rollout])

        # The first one opens connections, the second is the first to acknowledge an earlier one.
        assert [await sample(step) for step in (0, 1)] == [1, 1]
        with entered() as found:
            assert await sample(2) == 1
    for folder, most in _MOST.items():
        names = functions(found, folder)
        files = {name.partition(":")[0] for name in names}
        with capsys.disabled():
            print(f"\n{folder}: {len(names)} functions in {len(files)} files for one sample")
        assert len(names) <= most, "\n".join(names)
