"""Drafts of the quantized copy: their worth by format, what they cost here, and where they would pay on GPUs.

For each model: what is accepted with weights rounded to nearest in 4 and 8 bits, symmetrically and not; a GRPO run
every token of which the copy drafts, renewed after each update; the cost of a pass by the kernel of its products;
and how fast decoding is with the copy always on, toggled and planned, over plain decoding (on one core, in float32,
by processor time). For GPUs the measured acceptance is replayed through the table of step times of Qwen3-8B on an
H100: always on against toggled (EfficientRollout, Figure 4), and the ladder against fixed lengths (Figure 5a).
Parts are kept under runs/bench/quantized; --fresh measures them again. Writes runs/bench/quantized.json.

    python -m bench.quantized [--model DIR ...] [--steps 8] [--rounds 3]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from bench.model_drafting import in_own_process
from bench.quantized import formats, here, replays, training
from bench.quantized.tables import tables
from bench.report import console, format_value, show_rows, write

FOLDER = Path("runs/bench/quantized")
_PART_SECONDS = 60.0
"""About what a part takes before one was measured."""


class Parts:
    """Parts of the benchmark that are kept, and how long the missing ones will take."""

    def __init__(self, count: int, fresh: bool) -> None:
        self._left, self._fresh, self._taken = count, fresh, list[float]()

    def part(self, name: str, given: Any, make: Callable[[], Any]) -> Any:
        """Return a part, made now where none of these options is kept."""
        key = hashlib.sha256(repr(given).encode()).hexdigest()[:8]
        path = FOLDER / f"{name}-{key}.json"
        if self._fresh or not path.exists():
            each = sum(self._taken) / len(self._taken) if self._taken else _PART_SECONDS
            console().print(f"quantized: {name}; about {each * self._left:.0f} s left", highlight=False)
            began = time.monotonic()
            found = make()
            self._taken.append(time.monotonic() - began)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(found))
        self._left -= 1
        return json.loads(path.read_text())


def main() -> None:
    """Measure, replay, show and write."""
    given = arguments()
    parts = Parts((1 + len(here.PARTS)) * len(given.model), given.fresh)
    models = {_name(model): _measured(parts, model, given) for model in given.model}
    largest = models[_name(max(given.model, key=lambda each: (each / "model.safetensors").stat().st_size))]
    console().print("quantized: rollouts on H100s are simulated, about 60 s", highlight=False)
    by_bits = {
        bits: largest["here"]["formats"][formats.Rounding(bits, 128, True).name]["by_place"]
        for bits in (4, 8)
    }
    found: dict[str, Any] = {
        "models": models,
        "toggling": replays.toggling(by_bits),
        "laddering": replays.laddering([row["by_place"] for row in largest["trained"]["trajectory"]]),
        "predicted": replays.predicted(round(largest["trained"]["self_w4_acceptance"], 3)),
        "h100_refresh_seconds": replays.refresh_seconds(),
    }
    result = {**_figures(largest, found), "tables": tables(found), **found}
    for name, table in result["tables"].items():
        show_rows(f"quantized: {name}", table["columns"], table["rows"])
    shown = [(name, format_value(value)) for name, value in _figures(largest, found).items()]
    show_rows("quantized", ("figure", "value"), shown)
    write("quantized", result)


def _measured(parts: Parts, model: Path, given: argparse.Namespace) -> dict[str, Any]:
    name = _name(model)
    options = here.HereOptions(model.absolute(), given.prompts, given.samples, given.max_tokens, given.rounds)
    run = training.Given(
        given.steps, given.prompts, given.samples, given.max_tokens, 128, here.DEPTH, model.absolute()
    )
    return {
        "here": {
            each: parts.part(
                f"{name}-{each}", asdict(options), partial(in_own_process, here.measured, options, each)
            )
            for each in here.PARTS
        },
        "trained": parts.part(f"{name}-trained", asdict(run), partial(training.measure, run)),
    }


def _figures(largest: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of the largest model, and of the simulated rollouts with its acceptance."""
    measured, run = largest["here"], largest["trained"]
    modes = measured["modes"][formats.OWN]
    w4 = {(row["copy"], row["mode"], row["cap"]): row["of_plain"] for row in found["toggling"]}
    ladder = {row["way"]: row["of_plain"] for row in found["laddering"]}
    return {
        "self_w4_acceptance": run["self_w4_acceptance"],
        "block_efficiency": run["block_efficiency"],
        "refresh_seconds": run["refresh_seconds"],
        "same_tokens": int(run["same_tokens"]),
        "pass_vs_plain_step": measured["products"]["rows"][formats.OWN]["pass_ms"]
        / measured["products"]["rows"][formats.OWN]["plain_step_ms"],
        "here_fixed_8_vs_plain": modes["fixed 8"]["vs_plain"],
        "here_toggle_8_vs_plain": modes["toggle 8"]["vs_plain"],
        "here_planner_vs_plain": modes["planner 8"]["vs_plain"],
        "h100_time_fixed_8_of_plain": w4["W4", "fixed", 8],
        "h100_time_toggle_8_of_plain": w4["W4", "toggle", 8],
        "h100_time_planner_of_plain": w4["W4", "planner", 16],
        "h100_time_ladder_of_best_fixed": ladder["ladder"]
        / min(value for way, value in ladder.items() if way.startswith("fixed")),
        "h100_refresh_seconds": found["h100_refresh_seconds"],
    }


def _name(model: Path) -> str:
    return "tinymath" if model.absolute() == training.MODEL.absolute() else model.name


def arguments() -> argparse.Namespace:
    """Read the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+", default=[training.MODEL])
    parser.add_argument("--fresh", action="store_true", help="measure the parts that are kept again, too")
    parser.add_argument("--rounds", type=int, default=3, help="in which modes take turns")
    parser.add_argument("--steps", type=int, default=8, help="of the training run")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=320)
    return parser.parse_args()


if __name__ == "__main__":
    main()
