"""One rig for the attacks of a file."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.hostile.rig import Rig


@pytest.fixture(scope="package")
def rig(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A gateway, a facade and an instance, started once."""
    rig = Rig(tmp_path_factory.mktemp("hostile"), redis_url, f"hostile-{uuid.uuid4().hex[:8]}")
    try:
        yield rig.start()
    finally:
        rig.stop()
