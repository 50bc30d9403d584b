"""Steps over recurrent states: which samples are set back, to where, and for how long they are known."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.outputs import LogprobsLists

from services.generation.engine.core_steps import CoreSteps
from services.generation.engine.sampling.outputs import pack

SPEC = MambaSpec(8, ((2, 2),), (torch.float32,), num_speculative_blocks=1)


def output(sample_id: str, drafted: int, accepted: int) -> EngineCoreOutput:
    """Return the output of a step in which a sample had drafts."""
    count = accepted + 1
    marks = pack(np.array([drafted]), np.array([accepted]), np.array([0]), count)
    logprobs = LogprobsLists(np.zeros((count, 1), np.int64), np.zeros((count, 1)), marks)
    return EngineCoreOutput(sample_id, [5] * count, new_logprobs=logprobs)


@dataclass
class Core:
    """vLLM's core with given outputs; as in vLLM, only accepted tokens of a step count as computed."""

    outputs: list[EngineCoreOutput] = field(default_factory=list)
    posted: int = 0

    def __post_init__(self) -> None:
        group = SimpleNamespace(kv_cache_spec=SPEC)
        self.requests = {
            name: SimpleNamespace(num_computed_tokens=10, spec_token_ids=[]) for name in ("s1", "s2", "s3")
        }
        config = SimpleNamespace(kv_cache_groups=[group])
        self.scheduler: Any = SimpleNamespace(kv_cache_config=config, requests=self.requests)

    def step(self) -> tuple[dict[int, Any], bool]:
        for each in self.outputs:
            if each.finished:
                del self.requests[each.request_id]
            else:
                self.requests[each.request_id].num_computed_tokens += len(each.new_token_ids)
        return {0: SimpleNamespace(outputs=self.outputs)}, True

    def post_step(self, executed: bool) -> None:
        self.posted += executed


def computed(core: Core) -> dict[str, int]:
    """Return the number of computed tokens by sample."""
    return {name: request.num_computed_tokens for name, request in core.requests.items()}


def test_only_samples_with_a_refused_draft_are_set_back() -> None:
    core = Core([output("s1", 4, 2), output("s2", 4, 4), output("s3", 0, 0)])
    steps = CoreSteps(core, coupled=True)
    steps.put({"s1": [5] * 4, "s2": [5] * 4})
    steps.step()
    assert computed(core) == {"s1": 10, "s2": 15, "s3": 11}
    assert steps.rewound == {"s1"}

    # A step that computes only some of the tokens again has no output; the sample stays set back.
    core.outputs = []
    core.requests["s1"].num_computed_tokens = 12
    steps.step()
    assert steps.rewound == {"s1"}

    core.outputs = [output("s1", 0, 0)]
    steps.step()
    assert computed(core)["s1"] == 13
    assert not steps.rewound


def test_a_sample_that_ends_with_a_refused_draft_is_forgotten() -> None:
    ended = output("s1", 4, 1)
    ended.finish_reason = 0  # type: ignore[assignment]
    core = Core([ended])
    steps = CoreSteps(core, coupled=True)
    steps.put({"s1": [5] * 4})
    steps.step()
    assert not steps.rewound


def test_samples_of_vllms_own_speculation_are_not_set_back() -> None:
    """Its outputs have the ranks of tokens in place of our marks, and its workers keep a state for each draft."""
    core = Core([output("s1", 4, 2)])
    steps = CoreSteps(core, coupled=False)
    steps.step()
    assert computed(core)["s1"] == 13
    assert core.posted == 1
