"""A learner without a model: what the drafter service is tested against where a real one adds nothing.

It keeps the contract of services.drafter.learning.learner.Learner (what is saved is what it is, a state brings
all of it back, a drafter that is broken is refused). What it learns is one number, its acceptance length: each
update adds `GAIN` for each rollout, weighted. Its head is that number in a file.

A test controls it through files in the folder that FAKE_LEARNER names: `hold` keeps an update from ending,
`fail` makes it raise, `worse` makes what it learns make it worse, `full` keeps its state from being written. `log`
has a line for each thing that it did.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from services.contracts.drafter_checkpoint import Checkpoint, CorruptCheckpoint, folder_of
from services.drafter.learning.data import LearningSettings, TrainingSample

FACTORY = "tests.support.fake_learner:FakeLearner"
FRESH, GAIN = 1.0, 0.05


@dataclass(frozen=True)
class Report:
    kd_loss: float
    samples: int
    tokens: int
    skipped: int
    seconds: float


@dataclass(frozen=True)
class Evaluation:
    acceptance_length: float
    kd_loss: float
    samples: int


class FakeLearner:
    def __init__(self, policy_path: Path, settings: LearningSettings, checkpoint: Path | None = None) -> None:
        self._folder = Path(os.environ["FAKE_LEARNER"])
        self._length = FRESH if checkpoint is None else _read(checkpoint)
        self._learned: list[str] = []
        self._policy = policy_path
        self._log("begin", pid=os.getpid())

    def set_policy(self, path: Path, version: int) -> None:
        if not path.is_dir():
            raise FileNotFoundError(path)
        self._policy = path
        self._log("policy", version=version)

    def adopt(self, checkpoint: Path, sha256: str = "") -> None:
        self._length = _read(checkpoint)
        self._log("adopt", path=str(checkpoint))

    def update(self, rollouts: Sequence[TrainingSample], weights: Sequence[float]) -> Report:
        names = [f"{each.run_id}/{each.batch_id}/{each.prompt_id}/{each.slot}" for each in rollouts]
        self._log("updating", names=names)
        while (self._folder / "hold").exists():
            time.sleep(0.01)
        if (self._folder / "fail").exists():
            raise ValueError("told to fail")
        sign = -1 if (self._folder / "worse").exists() else 1
        self._length += sign * GAIN * sum(weights)
        self._learned += names
        self._log("updated", names=names, rewards=[each.reward for each in rollouts])
        return Report(1 / self._length, len(rollouts), sum(len(each.response) for each in rollouts), 0, 0.01)

    def evaluate(self, rollouts: Sequence[TrainingSample], drafter: Path | None = None) -> Evaluation:
        length = self._length if drafter is None else _read(drafter)
        names = [f"{each.run_id}/{each.batch_id}/{each.prompt_id}/{each.slot}" for each in rollouts]
        self._log("evaluated", names=names)
        return Evaluation(length, 1 / max(length, 0.01), len(rollouts))

    def save(self, parent: Path, version: int) -> Checkpoint:
        return write_drafter(parent, version, self._length)

    def save_state(self, path: Path) -> None:
        if (self._folder / "full").exists():
            path.write_text("[")
            raise OSError(errno.ENOSPC, "no space left")
        path.write_text(json.dumps([self._length, self._learned]))

    def load_state(self, path: Path) -> None:
        try:
            self._length, self._learned = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise CorruptCheckpoint(path, str(error)) from error
        self._log("loaded", learned=self._learned)

    def _log(self, did: str, **details: Any) -> None:
        with (self._folder / "log").open("a") as stream:
            stream.write(json.dumps({"did": did, **details}) + "\n")


def write_drafter(parent: Path, version: int, length: float) -> Checkpoint:
    """Return a drafter of this acceptance length."""
    path = folder_of(parent, version)
    path.mkdir(parents=True)
    (path / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLMEagle3"],
                **dict.fromkeys(("vocab_size", "draft_vocab_size", "hidden_size", "intermediate_size"), 8),
                **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 1),
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
            }
        )
    )
    content = json.dumps(length).encode()
    (path / "model.safetensors").write_bytes(content)
    return Checkpoint(path, version, sha256(content).hexdigest())


def _read(path: Path) -> float:
    try:
        return float(json.loads((path / "model.safetensors").read_text()))
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(path, str(error)) from error


def log_of(folder: Path) -> list[dict[str, Any]]:
    """What learners did in this folder, in order."""
    path = folder / "log"
    # The last line may be half written.
    *lines, _ = path.read_text().split("\n") if path.exists() else [""]
    return [json.loads(line) for line in lines]
