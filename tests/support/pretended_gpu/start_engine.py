"""Start an engine and print what stops it: `python start_engine.py KIND MODEL`, on the pretended machine.

KIND is stock, v1, v2 or invariant. The last line is a JSON object: the error's type and message, the files and
functions that it came through, and the platform and compute capability that vLLM found.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path


def main() -> None:
    """Build the engine, which must not succeed."""
    kind, model = sys.argv[1], sys.argv[2]
    # The engine runs in this process, where its error can be seen.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        stock(model) if kind == "stock" else ours(kind, model)
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        traceback.print_exception(error)
        where = [f"{Path(each.filename).name}:{each.name}" for each in frames]
        said = {"error": type(error).__name__, "message": str(error), "where": where}
    else:
        said = {"error": ""}
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    print(json.dumps({**said, "platform": type(current_platform).__name__, "capability": list(capability)}))


def stock(model: str) -> None:
    """Build vLLM's engine with its defaults."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    LLMEngine.from_engine_args(EngineArgs(model=model, skip_tokenizer_init=True, max_model_len=1024))


def ours(kind: str, model: str) -> None:
    """Build Paceline's engine."""
    from services.generation.engine.batch_invariance import choose_invariance
    from services.generation.engine.runner_choice import choose_runner
    from services.generation.engine.types import EngineOptions

    runner = "v2" if kind == "v2" else "v1"
    invariant = kind == "invariant"
    choose_runner(runner)
    choose_invariance(invariant)
    from services.generation.engine.core import Engine

    Engine(
        EngineOptions(
            model=model, dtype="bfloat16", max_model_len=1024, engine=runner, batch_invariant=invariant
        )
    )


if __name__ == "__main__":
    main()
