"""Define the systems, regimes and subjects of the rollout benchmark, as plain data."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.rollout.modelled import H100_8B
from bench.rollout.systems import BUBBLESPEC, BUBBLESPEC_RULE, KV_BYTES, SPEC_RL, System, each_left_out
from examples.tinymath.options import MODEL, Options
from paceline import Exactness, ExactnessLevel


@dataclass(frozen=True, slots=True)
class Regime:
    """A part of the recorded run: at most `samples` of each prompt, and `max_tokens` of each; None: all."""

    name: str
    about: str
    samples: int
    max_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class StockSystem:
    """Stock vLLM engines, one per core. `speculation` is vLLM's speculative_config."""

    name: str
    about: str
    speculation: dict[str, Any] | None = None
    needs: Path | None = None
    """Folder of packages that only this system needs, made by `scripts/arctic`."""


@dataclass(frozen=True, slots=True)
class ComparedSystem:
    """A row of the table: how the system is started, and a note for its reader."""

    setup: StockSystem | System
    quick: bool = False
    """Part of `make bench`; the others are part of `make bench-full`."""
    vllm: bool = False
    """One of vLLM's own speculative methods."""
    recorded: bool = True
    """Gives the recorded responses; False for a system that is lossy or has other noise by design."""
    note: str = ""
    """Difference from the published system, or reason why this machine is not a fair one for it."""

    @property
    def name(self) -> str:
        """The name in the table."""
        return self.setup.name


@dataclass(frozen=True, slots=True)
class Subject:
    """A model and the run that is recorded with it."""

    name: str
    model: Path
    options: Options
    regimes: tuple[str, ...]
    made_by: tuple[str, ...] = ()
    """Command that makes the model if it is missing; empty if the model is in the repository."""
    kv_bytes: int = KV_BYTES
    """Memory of an instance for the keys and values of its samples in two steps."""


ARCTIC = Path(".tools/arctic")
PLAIN, EVERYTHING, OFF = "plain", "paceline", "paceline off"
FOR_H100 = "paceline for an h100"
LONG_TAIL = "long tail"
REGIMES: Mapping[str, Regime] = {
    each.name: each
    for each in (
        Regime("latency-bound", "one sample a prompt: a step costs what starting it costs", 1),
        Regime("compute-bound", "all samples of a prompt, the first 64 tokens of each: no tail", 8, 64),
        Regime(LONG_TAIL, "all samples of a prompt, to their ends", 8),
    )
}
PACELINE = System(
    EVERYTHING,
    "Paceline as it comes: planner, history, pre-generation, reallocator, policy service",
    ("--speculation=planner", "--draft-window=16"),
    policy=True,
    reallocator=True,
)
_DRAFTED = 8
PAPERS = (
    ComparedSystem(
        BUBBLESPEC_RULE,
        recorded=False,
        note="lossy, so its responses are others; its index has siblings and what an instance saw earlier besides",
    ),
    ComparedSystem(
        BUBBLESPEC,
        note="keeps draft x with p_new(x), not min(1, p_new(x) / p_old(x)); drafts of earlier epochs, too",
    ),
    ComparedSystem(
        SPEC_RL, recorded=False, note="lossy by design: its responses are others, and their lengths with them"
    ),
    ComparedSystem(
        System(
            "efficientrollout",
            "EfficientRollout: drafts of a 4-bit copy of the policy where they pay, and its ladder of lengths",
            ("--speculation=toggle", "--quantized", "--quantized-group=32", "--drafters=[]"),
            drafts=False,
            bubbles=False,
            policy=True,
            knobs={"ladder": {"on": True}},
        ),
        note="on CPU a step of the 4-bit copy costs more than a plain one: the machine's fault, not the method's",
    ),
    ComparedSystem(
        System(
            "rlhfspec",
            "RLHFSpec: draft tokens selected over the whole batch, and samples moved between instances",
            ("--speculation=planner", "--drafters=suffix"),
            bubbles=False,
            reallocator=True,
        ),
        note="chains of the suffix index in place of trees of a draft model",
    ),
    ComparedSystem(
        System(
            "respec",
            "ReSpec: an EAGLE-3 head that learns from the run's samples and rewards, draft lengths by its solver",
            ("--speculation=solver", "--drafters=[]"),
            drafts=False,
            bubbles=False,
            learner=True,
        ),
        note="hardly drafts: a pass of the head costs most of one of so small a model's steps",
    ),
)
SYSTEMS: Mapping[str, ComparedSystem] = {
    each.name: each
    for each in (
        ComparedSystem(
            StockSystem(PLAIN, "stock vLLM, one engine a core, prompts split, no gateway"), quick=True
        ),
        ComparedSystem(
            StockSystem(
                "vllm ngram",
                "stock vLLM with its n-gram drafts",
                {
                    "method": "ngram",
                    "prompt_lookup_min": 3,
                    "prompt_lookup_max": 5,
                    "num_speculative_tokens": _DRAFTED,
                },
            ),
            quick=True,
            vllm=True,
        ),
        ComparedSystem(
            StockSystem(
                "vllm suffix",
                "stock vLLM with suffix decoding (arctic-inference), its cache kept over all steps",
                {"method": "suffix", "num_speculative_tokens": _DRAFTED},
                needs=ARCTIC,
            ),
            quick=True,
            vllm=True,
        ),
        ComparedSystem(PACELINE, quick=True),
        ComparedSystem(
            replace(
                PACELINE,
                name=FOR_H100,
                about="Paceline that plans its drafts by the step times of an 8B model on an H100",
                plans_for=H100_8B,
            ),
            note="plans for a device that is not there: its seconds here say nothing, its modelled ones do",
        ),
        ComparedSystem(
            System(
                OFF,
                "Paceline's services around plain decoding",
                ("--speculation=off",),
                drafts=False,
                bubbles=False,
                policy=True,
                reallocator=True,
            )
        ),
        ComparedSystem(
            replace(
                PACELINE,
                name="paceline coupled_history",
                about="Paceline with one noise for all epochs: a slot's last rollout is its draft",
                exactness=Exactness(ExactnessLevel.COUPLED_HISTORY),
            ),
            recorded=False,
            note="lossless, but of other noise than was recorded: its responses are others, and their lengths",
        ),
        *PAPERS,
        *(ComparedSystem(each) for each in each_left_out(PACELINE)),
    )
}
SMOLLM2 = Subject(
    "smollm2",
    Path("runs/models/smollm2"),
    Options(steps=8, prompts=8, samples=4, pool=16, max_tokens=1000, temperature=0.7, lr=1e-6, threads=2),
    tuple(REGIMES),
    made_by=("scripts/real-model",),
    kv_bytes=2 << 30,
)
"""A language model of 135 million parameters and 49,152 tokens of BPE, on problems in words."""
SUBJECTS: Mapping[str, Subject] = {
    "tinymath": Subject(
        "tinymath",
        MODEL,
        Options(steps=12, prompts=16, samples=8, pool=64, max_tokens=800, lr=1.5e-4),
        tuple(REGIMES),
    ),
    "tinymath-16m": Subject(
        "tinymath-16m",
        Path("runs/tinymath-16m"),
        Options(steps=12, prompts=16, samples=2, pool=64, max_tokens=800, lr=1.5e-4),
        (LONG_TAIL,),
        made_by=(
            sys.executable,
            "-m",
            "examples.tinymath.grow_model",
            "--out=runs/tinymath-16m",
            "--steps=200",
        ),
    ),
    "smollm2": SMOLLM2,
    "smollm2-1e-5": replace(SMOLLM2, name="smollm2-1e-5", options=replace(SMOLLM2.options, lr=1e-5)),
}
