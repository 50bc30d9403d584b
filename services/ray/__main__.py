"""Command of the platform on a Ray cluster: `python -m services.ray up|status|down --model DIR --redis-url URL`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from services.platform.config import load_config
from services.ray.config import RayConfig
from services.ray.platform import RayPlatform, RayPlatformError, attached

ACTIONS = ("up", "status", "down")


def main(argv: Sequence[str]) -> int:
    """Run an action and return the exit status; 2 if the action is unknown."""
    if not argv or argv[0] not in ACTIONS:
        print(
            f"paceline: give one of {', '.join(ACTIONS)}, then options (--help lists them)", file=sys.stderr
        )
        return 2
    config = load_config(RayConfig, argv[1:])
    try:
        with attached(config):
            return _do(argv[0], RayPlatform(config))
    except (RayPlatformError, ConnectionError) as error:
        print(f"paceline: {error}", file=sys.stderr)
        return 1


def _do(action: str, platform: RayPlatform) -> int:
    if action == "down":
        platform.stop()
        return 0
    if action == "up":
        platform.start()
    processes = platform.processes()
    for name, ready in processes.items():
        print(f"{name:<16}{'not running' if ready is None else ready.address}")
    return 0 if all(processes.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
