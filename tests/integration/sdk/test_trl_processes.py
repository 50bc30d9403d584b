"""Rollouts of a trainer with two processes: one asks for all, and each gets its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.trl_rank import PROMPTS, RANKS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each process tells."""
    pytest.importorskip("accelerate", reason="accelerate is not installed (extra trl)")
    folder = tmp_path_factory.mktemp("ranks")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.support.trl_rank", str(folder), str(rank)],
            cwd=ROOT,
            env={**os.environ, **address, "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [process.communicate(timeout=150)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(said)
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def test_each_process_gets_the_answers_to_its_own_prompts(ranks: list[dict[str, Any]]) -> None:
    slots = [[10, 11, 10], [11, 10, 11]]
    for rank, told in enumerate(ranks):
        own = [[*prompt, slot] for prompt, slot in zip(PROMPTS[rank], slots[rank], strict=True)]
        assert told["given"] == [own] * 3


def test_the_main_process_alone_pushes_and_submits_groups_of_all(ranks: list[dict[str, Any]]) -> None:
    groups = [[[1, 2], 2], [[3], 2], [[4, 5], 2]]
    steps = [[["push", ["bias", "weight"]], ["check", [3]], ["rollout", step, groups]] for step in range(4)]
    # The policy is checked after the pushes 1, 2 and 4.
    del steps[2][1]
    assert ranks[0]["calls"] == [call for step in steps for call in step]
    assert ranks[1]["calls"] == []


def test_an_error_of_the_main_process_ends_the_rollout_in_all(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["error"] == "OSError: no gateway"
    assert ranks[1]["error"] == "RolloutFailedError: the main process failed: OSError: no gateway"


def test_another_policy_on_the_fleet_ends_the_rollout_in_all(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["mismatch"].startswith(
        "PolicyMismatchError: the fleet does not sample the trainer's policy"
    )
    assert ranks[1]["mismatch"].startswith("RolloutFailedError: the main process failed: PolicyMismatchError")
