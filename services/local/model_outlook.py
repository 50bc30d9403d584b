"""Findings about a model before it is loaded: what vLLM says of it, and what instances go without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from services.generation.engine.model_support import by_reason
from services.local.findings import Finding, FindingState

_SECONDS = 300
_MODULE = "services.generation.engine.outlook"


def model_findings(model: Path, dtype: str) -> list[Finding]:
    """Return findings about a model folder, by vLLM's own word. Takes as long as the import of vLLM."""
    if not (model / "config.json").is_file():
        return [Finding("model", FindingState.MISSING, f"{model} has no config.json")]
    return findings_of(_asked(model, dtype))


def findings_of(told: Mapping[str, Any]) -> list[Finding]:
    """Return findings by the fields of an `Outlook` (services/generation/engine/outlook.py); {}: there is none."""
    if not told:
        return [Finding("model", FindingState.SCARCE, "unknown: vLLM could not be asked")]
    if told["refusal"]:
        return [Finding("model", FindingState.MISSING, f"vLLM does not serve it here: {told['refusal']}")]
    about = f"{told['dtype']}, KV: {', '.join(told['kinds']) or 'unknown'}"
    found = [Finding("model", FindingState.FINE, about)]
    if told["unknown"]:
        found = [Finding("model", FindingState.SCARCE, f"unknown whether vLLM loads it: {told['unknown']}")]
    return found + [Finding("without", FindingState.SCARCE, line) for line in by_reason(told["refused"])]


def _asked(model: Path, dtype: str) -> Mapping[str, Any]:
    """Ask in a process of its own: vLLM keeps global state."""
    command = [sys.executable, "-m", _MODULE, str(model), dtype]
    try:
        ended = subprocess.run(
            command,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR"},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return {}
    # vLLM may write lines of its own.
    lines = [line for line in ended.stdout.decode(errors="replace").splitlines() if line.startswith("{")]
    found: Mapping[str, Any] = json.loads(lines[-1]) if lines else {}
    return found
