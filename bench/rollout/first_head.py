"""Train the EAGLE-3 head that a learner begins with, on the recorded run's first step, which is not counted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.report import console
from bench.rollout.record import RecordedRun
from services.contracts.drafter_checkpoint import folder_of

_SECONDS = 60


class FirstHeadError(RuntimeError):
    """No head could be trained; the text says why."""


def first_head(run: RecordedRun, model: Path, folder: Path) -> Path:
    """Return the folder of the head for this run under `folder`; it is trained there now if there is none.

    A head that has seen nothing would draft nothing in a run this short, and ReSpec begins with a trained one.
    """
    parent = (folder / run.hash[:16]).absolute()
    made = folder_of(parent, 1)
    if made.is_dir():
        return made
    parent.mkdir(parents=True, exist_ok=True)
    rollouts = parent / "rollouts.jsonl"
    step = run.trajectory.steps[0]
    prompts = {group.prompt_id: [int(each) for each in group.prompt_token_ids] for group in step.groups}
    lines = [
        json.dumps(
            {"prompt": prompts[key.prompt_id], "response": sample.token_ids.tolist(), "seed": sample.seed}
        )
        for key, sample in step.samples.items()
    ]
    rollouts.write_text("\n".join(lines) + "\n")
    console().print(f"rollout: training a first EAGLE-3 head, {_SECONDS} s", highlight=False)
    module = [sys.executable, "-m", "services.drafter.warmup"]
    options = [f"--policy={model}", f"--rollouts={rollouts}", f"--out={parent}", f"--seconds={_SECONDS}"]
    done = subprocess.run([*module, *options], capture_output=True, text=True, check=False)
    if done.returncode or not made.is_dir():
        raise FirstHeadError((done.stderr or done.stdout).strip().rpartition("\n")[2])
    return made
