"""Settings of a Ray of its own for tests."""

from __future__ import annotations

from typing import Any

LOCAL_RAY: dict[str, Any] = {
    "num_cpus": 2,
    "include_dashboard": False,
    "log_to_driver": False,
    # Ray's workers are nice by 15. On a machine with other load they took five minutes to import vLLM.
    "_system_config": {"worker_niceness": 0},
}
