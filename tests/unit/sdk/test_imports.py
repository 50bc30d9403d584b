"""The SDK stays slim."""

import subprocess
import sys

HEAVY = ("torch", "vllm", "typer", "rich", "pydantic", "redis", "services", "safetensors", "transformers")


def test_importing_the_sdk_brings_in_nothing_heavy() -> None:
    code = f"import paceline, paceline.cli, sys; print(sorted(set({HEAVY!r}) & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"
