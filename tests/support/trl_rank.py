"""One process of a trainer whose rollouts are Paceline's: `python -m tests.support.trl_rank FOLDER RANK`.

Two of them form a group. Each writes, in JSON, what its rollouts gave, what calls its run got, and how a failing
rollout ended.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from paceline import FinishReason, Provenance, Sample, SampleRequest, SampleStatus
from paceline.integrations.trl import PacelineRollout

RANKS = 2
VOCABULARY = 16
# Of each rank. One prompt is on both of them.
PROMPTS = [[[1, 2], [1, 2], [3]], [[3], [4, 5], [4, 5]]]


class RunInMemory:
    """A run whose samples say their prompt and slot. The fourth rollout is refused."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.certainty = 1 / VOCABULARY
        """Probability that it says each token of a check has."""
        self.client = self

    def push_weights(self, weights: Any, *, in_flight: object) -> None:
        self.calls.append(["push", sorted(weights)])

    def rollout(self, step: int, groups: Any, sampling: Any, *, exactness: object = None) -> Any:
        self.calls.append(["rollout", step, [[list(g.prompt_token_ids), g.samples] for g in groups]])
        if step == 3:
            raise OSError("no gateway")
        samples = BatchInMemory()
        for group in groups:
            samples += [
                answer(group.prompt_id, group.prompt_token_ids, slot) for slot in range(group.samples)
            ]
        return samples

    def deployments(self) -> list[Any]:
        return [self]

    def generate(self, request: SampleRequest) -> list[Sample]:
        if not request.slot:
            self.calls.append(["check", list(request.prompt_token_ids)])
        return [replace(answer("", [1, 2], 0), logprobs=np.log([self.certainty] * 3))]


class BatchInMemory(list[Sample]):
    """The samples of a rollout, in some order."""

    batch = SimpleNamespace(policy_version=1)

    def stats(self) -> dict[str, float]:
        return {"rollout/samples": len(self)}


def answer(prompt_id: str, prompt: Any, slot: int) -> Sample:
    tokens = np.array([*prompt, 10 + slot])
    return Sample(
        prompt_id=prompt_id,
        slot=slot,
        token_ids=tokens,
        logprobs=np.zeros(len(tokens), dtype=np.float32),
        finish_reason=FinishReason.STOP,
        status=SampleStatus.COMPLETED,
        version_spans=(),
        provenance=Provenance(),
        seed=0,
    )


def trainer(accelerator: Any, model: Any) -> Any:
    """A trainer with what the rollout reads of TRL's."""
    args = SimpleNamespace(
        use_vllm=False, generation_kwargs=None, steps_per_generation=1, gradient_accumulation_steps=1
    )
    return SimpleNamespace(
        args=args,
        accelerator=accelerator,
        model=accelerator.unwrap_model(model),
        model_wrapped=model,
        state=SimpleNamespace(global_step=0, max_steps=9),
        processing_class=object(),
        tools=[],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        min_p=None,
        repetition_penalty=1.0,
        max_completion_length=8,
        eos_token_ids=[2],
        num_iterations=1,
        num_generations=2,
        _tokenize_prompts=lambda prompts: (prompts, None, {}),
        _log_metric=lambda name, value: None,
    )


def uniform_model(torch: Any) -> Any:
    """A model that finds all tokens equally likely."""

    class Uniform(torch.nn.Linear):  # type: ignore[misc]
        def forward(self, input_ids: Any, **_: Any) -> Any:
            return SimpleNamespace(logits=torch.zeros(*input_ids.shape, VOCABULARY))

    return Uniform(2, 2)


def refused(rollout: PacelineRollout, rank: int, one: Any) -> str:
    """Roll out and return the error."""
    try:
        rollout(PROMPTS[rank], one)
    except Exception as raised:
        return f"{type(raised).__name__}: {raised}"
    return ""


def main(folder: Path, rank: int) -> None:
    """Train for three steps, fail in the fourth, and begin anew on a fleet of another policy."""
    accelerate, torch = import_module("accelerate"), import_module("torch")
    accelerator = accelerate.Accelerator(cpu=True)
    assert accelerator.num_processes == RANKS
    one = trainer(accelerator, accelerator.prepare(uniform_model(torch)))
    run = RunInMemory()
    rollout = PacelineRollout(run, hints=False)  # type: ignore[arg-type]
    given = []
    for step in (0, 1, 2):
        one.state.global_step = step
        given.append(rollout(PROMPTS[rank], one)["completion_ids"])
    one.state.global_step = 3
    error = refused(rollout, rank, one)
    told = {"given": given, "calls": list(run.calls), "error": error}
    run.certainty = 0.5
    told["mismatch"] = refused(PacelineRollout(run, hints=False), rank, one)  # type: ignore[arg-type]
    (folder / f"rank-{rank}.json").write_text(json.dumps(told))
    torch.distributed.destroy_process_group()
    # Of PyTorch 2.13: once a model was wrapped, gloo's threads live on, since DistributedDataParallel leaves the
    # process group behind. One that is slow to let go of the last broadcast's tensor wants the interpreter while
    # that ends, is unwound by it out of a destructor, and aborts the process. So the interpreter does not end here.
    os._exit(0)


if __name__ == "__main__":
    os.environ |= {"RANK": sys.argv[2], "LOCAL_RANK": sys.argv[2], "WORLD_SIZE": str(RANKS)}
    main(Path(sys.argv[1]), int(sys.argv[2]))
