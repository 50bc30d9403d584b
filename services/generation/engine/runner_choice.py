"""Choose which of vLLM's two model runners a process uses: before vLLM is imported, which reads it from there.

Imports neither vLLM nor torch.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path

from services.generation.engine.types import EngineOptions
from services.step_time.machine import on_cpu

RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_VARIABLES = {
    # The executor is in this process.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    RUNNER_VARIABLE: "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Matrix products that oneDNN has compiled, one for each shape and number of rows that steps have had. Each
    # takes about 0.3 MiB, and oneDNN keeps 1,024 where nobody says otherwise. vLLM keeps 32 of each layer besides.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
}
AUTO, V1, V2 = "auto", "v1", "v2"
"""Values of the option `engine`."""


def set_variables() -> None:
    """Set what vLLM reads when it is imported, and when an engine is built; what is set already stays.

    A process that was forked where vLLM is imported may have another environment.
    """
    for name, value in _VARIABLES.items():
        os.environ.setdefault(name, value)
    # torch would load compiled code from a folder for temporary files that any user could have made before. It
    # makes the folder when it is imported: without a home folder that can be written to, its own choice stays.
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        with suppress(RuntimeError, OSError):
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "paceline/inductor")
            folder.mkdir(parents=True, exist_ok=True)
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)


def runner_of(engine: str) -> str:
    """Return V1 or V2: `auto` is V1 until V2 has been measured to be faster on a GPU."""
    return V2 if engine == V2 else V1


def refusal(options: EngineOptions) -> str:
    """Return why an engine cannot be built on V2 with these options; "" if it can, or is not to be."""
    if runner_of(options.engine) == V1:
        return ""
    reasons = (
        (options.quantized is not None, "the quantized copy drafts on V1 only"),
        (options.eagle3 is not None, "the EAGLE-3 head drafts on V1 only"),
        (not options.coupled, "vLLM's own sampler is there for comparison with V1"),
    )
    return next((f"engine v2: {reason}" for applies, reason in reasons if applies), "")


def choose_runner(engine: str) -> None:
    """Set the runner of the engine that this process will build.

    Raises:
        RuntimeError: V2 on CPU, and vLLM was imported before.
    """
    chosen = runner_of(engine)
    os.environ[RUNNER_VARIABLE] = "1" if chosen == V2 else "0"
    if chosen == V2 and on_cpu():
        from services.generation.engine.v2.interpreter import install, is_installed

        if is_installed():
            return
        if "vllm" in sys.modules:
            raise RuntimeError("engine v2 on CPU has to be chosen before vLLM is imported")
        install()


def check_runner(engine: str) -> None:
    """Raise RuntimeError where vLLM of this process will not use the runner that an engine asks for."""
    wanted = "1" if runner_of(engine) == V2 else "0"
    if os.environ.get(RUNNER_VARIABLE) != wanted:
        raise RuntimeError(f"engine {engine}: call choose_runner before vLLM is imported")
