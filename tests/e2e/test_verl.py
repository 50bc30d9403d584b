"""verl's server manager, clients and checkpoint manager on a real platform, from an environment of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from examples.tinymath import tokenizer
from services.generation.engine.types import EngineRequest, Sampling
from services.local import Platform
from tests.e2e.conftest import make_model
from tests.support.oracle import Oracle

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-verl/bin/python"
TRAINER = ROOT / "tests/support/verl_trainer.py"
# As in tests/support/verl_trainer.py.
PROMPT, OTHER = [1, 9, 17, 5], [1, 30, 31, 32, 33]
LONG = 900
# Of a user; the template is that of no model, but has what verl looks for in one of Qwen.
MESSAGES = ["1+2=", "1+2=", "9*3="]
TEMPLATE = "<bos>{% for each in messages %}{{ each['content'] }}<|im_end|>\n{% endfor %}"
# Two forwards in float32 agree to about 1e-5 here; scores closer than this are a tie.
TIE = 1e-3

pytestmark = [
    pytest.mark.skipif(not PYTHON.exists(), reason="verl is not installed in .venv-verl (scripts/verl-env)"),
    # Ray starts a process for each part of verl, and each of them imports torch.
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def folders(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The weights that are served first, that the checkpoint engine pushes, and that the trainer pushes itself."""
    return [model, *(make_model(tmp_path_factory.mktemp("weights"), seed) for seed in (1, 2))]


@pytest.fixture(scope="module")
def words(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The configuration of the model, and a tokenizer for it."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("words")
    shutil.copy(model / "config.json", folder)
    tokenizer.save(folder)
    made = AutoTokenizer.from_pretrained(folder)
    made.add_special_tokens({"additional_special_tokens": ["<|im_end|>"]})
    made.chat_template = TEMPLATE
    made.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def answer(
    platform: Platform, folders: list[Path], words: Path, tmp_path_factory: pytest.TempPathFactory
) -> Any:
    """What verl got."""
    folder, config = tmp_path_factory.mktemp("verl"), platform.config
    settings: dict[str, Any] = {"address": platform.gateway_address, "run_id": "of-verl"}
    if config.tls is not None:
        files = {name: str(getattr(config.tls, name)) for name in ("ca_file", "cert_file", "key_file")}
        settings |= files
    order = {
        "settings": settings,
        "folders": [str(each) for each in folders[1:]],
        "words": str(words),
        "messages": [[{"role": "user", "content": each}] for each in MESSAGES],
    }
    (folder / "order.json").write_text(json.dumps(order))
    # Not as a module: what verl's wheel brings has a package `tests` as well.
    command = [PYTHON, "-P", TRAINER, folder / "order.json", folder / "answer.json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PACELINE_TOKEN": config.token or ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads((folder / "answer.json").read_text())


def check(folder: Path, prompt: Sequence[int], output: dict[str, Any], temperature: float = 0.0) -> None:
    """The log-probabilities are those of plain decoding with a folder's weights, and so are tokens if greedy."""
    sampling = Sampling(temperature=temperature, processed_logprobs=True)
    judged = Oracle(folder, [2]).judge(EngineRequest("", tuple(prompt), (), sampling, 0), output["token_ids"])
    if temperature:
        assert output["log_probs"] == pytest.approx(judged.processed, abs=TIE)
    else:
        assert output["log_probs"] is None
        assert len(output["token_ids"]) == 16
        assert max(judged.gap) < TIE


def test_verl_can_call_all_that_it_calls(answer: Any) -> None:
    assert answer["hooks"] == []


def test_equal_prompts_have_different_samples_with_their_log_probabilities(
    answer: Any, folders: list[Path]
) -> None:
    responses = {tuple(output["token_ids"]) for output in answer["group"]}
    assert len(responses) == 4
    for output in answer["group"]:
        check(folders[0], PROMPT, output, temperature=1.0)
        assert output["stop_reason"] == "completed"
        assert len(output["token_ids"]) == 32 or output["token_ids"][-1] == 2
        assert output["extra_fields"]["spec_num_draft_tokens"] >= 0


def test_what_is_refused_is_named_and_harms_nobody_else(answer: Any, folders: list[Path]) -> None:
    parameter, image, token = answer["refused"]
    assert "sampling_params has best_of" in parameter
    assert "images" in image
    assert "groups[0].prompt_token_ids" in token
    check(folders[0], OTHER, answer["beside"])


def test_its_agents_have_conversations_with_the_fleet(answer: Any, folders: list[Path]) -> None:
    found = answer["conversations"]
    end_of_turn = [len(tokenizer.TOKENS), *tokenizer.encode("\n")]
    for message, row in zip(MESSAGES, found, strict=True):
        assert row["prompt"] == [*tokenizer.prompt_ids(message), *end_of_turn]
        check(folders[0], row["prompt"], row, temperature=1.0)
        assert len(row["token_ids"]) == 32 or row["token_ids"][-1] == 2
    assert found[0]["prompt"] == found[1]["prompt"]
    assert found[0]["token_ids"] != found[1]["token_ids"], "equal prompts have different samples"


def test_an_abort_returns_the_tokens_so_far_and_later_requests_wait(answer: Any, folders: list[Path]) -> None:
    found = answer["aborted"]
    assert found["partial"]["stop_reason"] == "aborted"
    assert 0 < len(found["partial"]["token_ids"]) < LONG
    check(folders[0], PROMPT, found["partial"], temperature=1.0)
    assert found["waited"]
    check(folders[0], OTHER, found["after"])
    assert (found["sent_away"]["stop_reason"], found["sent_away"]["token_ids"]) == ("aborted", [])


def test_after_the_checkpoint_engine_has_pushed_tokens_are_of_the_new_weights(
    answer: Any, folders: list[Path]
) -> None:
    assert answer["metrics"]["paceline/policy_version"] > 0
    check(folders[1], OTHER, answer["pushed"])
    assert answer["pushed"]["extra_fields"]["global_steps"] == 7


def test_a_response_that_an_update_ended_goes_on_under_the_new_weights(
    answer: Any, folders: list[Path]
) -> None:
    found = next(
        each
        for each in answer["resumed"]
        if (each["extra_fields"]["min_global_steps"], each["extra_fields"]["max_global_steps"]) == (6, 7)
        and len(each["token_ids"]) == LONG
    )
    assert len(found["log_probs"]) == LONG
    old, new = (
        Oracle(folder).judge(
            EngineRequest("", tuple(PROMPT), (), Sampling(temperature=1.0), 0), found["token_ids"]
        )
        for folder in folders[:2]
    )
    given = found["log_probs"]
    cut = next(i for i in range(LONG) if abs(given[i] - old.processed[i]) > TIE)
    assert 0 < cut < LONG
    assert given[cut:] == pytest.approx(new.processed[cut:], abs=TIE)


def test_a_trainer_that_is_its_own_rollout_pushes_too(answer: Any, folders: list[Path]) -> None:
    check(folders[2], OTHER, answer["hybrid"])
    assert answer["hybrid"]["extra_fields"]["global_steps"] == 8
