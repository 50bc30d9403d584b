"""A platform that one file of tests after another borrows, and gets as it was started."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from paceline import Client, InstanceState, KnobSetting, WeightFolder
from services.local import Platform, PlatformConfig
from tests.support.zygote import launch

_SECONDS = 60.0


class LentPlatform:
    """At most one platform, which starts when it is borrowed and stops when it is told to."""

    def __init__(self) -> None:
        self._platform: Platform | None = None
        self._knobs: Mapping[str, Any] = {}

    @contextmanager
    def lend(self, config: Callable[[], PlatformConfig]) -> Iterator[Platform]:
        """Start the platform if there is none, and mend afterwards what the borrower has changed.

        One that cannot be mended is stopped, so that the next borrower gets a new one.
        """
        if self._platform is None:
            self._platform = Platform(config(), launch=launch)
            self._platform.start()
            with self._platform.client() as client:
                self._knobs = client.knobs().knobs
        yield self._platform
        try:
            self._mend(self._platform)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the platform, if there is one."""
        platform, self._platform = self._platform, None
        if platform is not None:
            platform.stop()

    def _mend(self, platform: Platform) -> None:
        """Restart what is gone; then set the knobs and the weights back to those of the start."""
        for child in platform.processes:
            if not child.alive:
                platform.restart(child.spec.name)
        with platform.client() as client:
            _resume(client)
            setting = client.knobs()
            if setting.knobs != self._knobs:
                client.set_knobs("", KnobSetting(setting.revision, self._knobs))
            if client.versions().policy_version:
                _push(client, platform.config.model)
        platform.wait_serving(platform.config.instances, time.monotonic() + _SECONDS)


def _resume(client: Client) -> None:
    halted = (InstanceState.PAUSED, InstanceState.DRAINING)
    if any(each.state in halted for each in client.instances()):
        client.resume()


def _push(client: Client, model: Path) -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        client.run("lent", weights=WeightFolder(Path(folder), model)) as run,
    ):
        run.push_weights(load_file(model / "model.safetensors"))
