"""Start an engine of bench.gpu and print what stops it, on the pretended machine.

    python start_engine.py KIND GRAPHS DTYPE FOLDER

KIND is a name of `EngineKind`; FOLDER gets the model's config. The last line is a JSON object: the error's type and
message, the files and functions that it came through, and the platform and compute capability that vLLM found.
"""

from __future__ import annotations

import json
import sys
import traceback
from pathlib import Path

from bench.gpu.engines.setup import STOCK, EngineSetup, model_folder
from bench.gpu.sizes import EngineKind, GpuSizes, Graphs


def main() -> None:
    """Build the engine, which must not succeed."""
    kind, graphs, dtype, folder = sys.argv[1:]
    model, load_format = model_folder("q17", Path(folder) / "model")
    sizes = GpuSizes()
    setup = EngineSetup(
        EngineKind[kind],
        model,
        load_format,
        dtype,
        Graphs(graphs),
        max(sizes.rows),
        sizes.longest,
        Path(folder) / "head",
        0 if EngineKind[kind] in STOCK else sizes.draft_window,
    )
    try:
        setup.orders()
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


if __name__ == "__main__":
    main()
