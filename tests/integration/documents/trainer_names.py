"""What the documents leave to the trainer: prompts, a policy, rewards, tools."""

from __future__ import annotations

import ast
import asyncio
import inspect
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

import paceline
from paceline import AsyncClient, Client, Group, SamplingParams, WeightFolder


class Prompts(list[Any]):
    """Prompts of a step, and after them groups of further ones by `next`."""

    def __next__(self) -> Group:
        self.append(SimpleNamespace(id=f"p{len(self)}", token_ids=[1, 2, 3 + len(self)]))
        return Group(self[-1].id, self[-1].token_ids, samples=2)


PROMPTS = [SimpleNamespace(id=f"p{number}", token_ids=[1, 2, 3 + number]) for number in range(4)]
GROUPS = [Group(each.id, each.token_ids, samples=2) for each in PROMPTS]


class Gathered(np.ndarray[Any, Any]):
    """A tensor with the method of a DTensor."""

    def full_tensor(self) -> np.ndarray[Any, Any]:
        """Return the whole tensor."""
        return np.asarray(self)


WEIGHTS = {"weight": np.zeros((2, 2), np.float32)}
POLICY = SimpleNamespace(state_dict=lambda: WEIGHTS)
SHARDED = SimpleNamespace(state_dict=lambda: {name: each.view(Gathered) for name, each in WEIGHTS.items()})


def run_block(text: str, line: int, address: str, weights: WeightFolder) -> None:
    """Run a block as a trainer would that has the names that the block uses.

    One with `await` runs in an event loop and gets the asynchronous client and run, others the blocking ones.
    """
    code = compile(text, f"line {line}", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    given, run_id = _names(step=line), f"run-{line}"

    async def in_a_loop() -> None:
        async with AsyncClient(address) as client:
            run = client.run(run_id, seed=1, weights=weights)
            await eval(code, given | {"client": client, "run": run})

    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(in_a_loop())
    else:
        with Client(address) as client, client.run(run_id, seed=1, weights=weights) as run:
            exec(code, given | {"client": client, "run": run})


def play(run_id: str, address: str, weights: WeightFolder) -> None:
    """Do a step of a run that a page speaks of."""
    with Client(address) as client, client.run(run_id, seed=1, weights=weights) as run:
        assert len(list(run.rollout(0, GROUPS, SamplingParams(max_tokens=16)))) == len(GROUPS) * 2


def policy_folder(folder: Path) -> WeightFolder:
    """Return a transport for instances without weights: they take a folder, and no stream."""
    (model := folder / "model").mkdir()
    return WeightFolder(folder / "weights", model)


def _names(step: int) -> dict[str, Any]:
    return {
        **{name: getattr(paceline, name) for name in paceline.__all__},
        "paceline": paceline,
        "asyncio": asyncio,
        "step": step,
        "loader": [PROMPTS, PROMPTS],
        "prompts": Prompts(PROMPTS),
        "groups": GROUPS,
        "first_groups": GROUPS,
        "batches": [GROUPS, GROUPS],
        "policy": POLICY,
        "model": POLICY,
        "sharded_model": SHARDED,
        "Path": Path,
        "update_policy": list,
        "is_useful": lambda group: len(group[0].token_ids) > 0,
        "kept": [],
        "wanted": 3,
        "tools": paceline.ToolUse(call_strings=("</call>",), max_calls=2),
        "sampling": SamplingParams(max_tokens=16),
        "encode": lambda text: [5, 6],
        "decode": lambda token_ids: " ".join(map(str, token_ids)),
        "run_tool": lambda text: text,
        "wandb": SimpleNamespace(log=_log),
        "mlflow": SimpleNamespace(log_metrics=_log),
        "writer": SimpleNamespace(add_scalar=lambda name, value, step: None),
    }


def _log(figures: dict[str, float], step: int) -> None:
    assert figures["rollout/samples"] == len(GROUPS) * 2, step
