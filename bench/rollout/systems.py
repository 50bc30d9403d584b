"""Define the systems that benchmarks compare: platform configurations, also with one mechanism left out."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from paceline import Exactness
from services.local import PlatformConfig

KV_BYTES = 512 << 20
"""KV memory of an instance: the samples of a tinymath step and of the next one, with a margin."""


@dataclass(frozen=True, slots=True)
class System:
    """A configuration: flags of the services, the services that run, and the requests of batches."""

    name: str
    about: str
    instance_options: tuple[str, ...]
    bubble_options: tuple[str, ...] = ()
    gateway_options: tuple[str, ...] = ()
    drafts: bool = True
    bubbles: bool = True
    # Most benchmarks compare ways to speculate, on samples that do not move.
    policy: bool = False
    reallocator: bool = False
    learner: bool = False
    knobs: Mapping[str, Any] = field(default_factory=dict)
    """Knobs set for the whole fleet once it serves; needs the policy service."""
    exactness: Exactness = field(default_factory=Exactness)
    plans_for: str = ""
    """Device whose modelled step times instances plan with (bench/rollout/modelled.py); empty: measured times."""


PLAIN = System("plain", "one token at a time", ("--speculation=off",), drafts=False, bubbles=False)
BUBBLESPEC = System(
    "bubblespec",
    "BubbleSpec but for its rule (Eq. 2): noise of its own, suffix drafts of 4 tokens, the step's bubbles only",
    ("--speculation=fixed", "--drafters=suffix", "--draft-window=4", "--draft-floor=0", "--survival-floor=0"),
    ("--no-coupled", "--during-update=halt"),
)
BUBBLESPEC_RULE = replace(
    BUBBLESPEC,
    name="bubblespec eq 2",
    about="BubbleSpec as published: its rule for drafts (Eq. 2) as well, and nothing kept of earlier epochs",
    instance_options=(*BUBBLESPEC.instance_options, "--lenient-drafts"),
    gateway_options=("--no-history",),
    exactness=Exactness.lenient(1.0),
)
SPEC_RL = System(
    "spec-rl",
    "SPEC-RL as published: cached rollouts taken over with lenience e^0.5, then plain decoding",
    ("--speculation=off",),
    bubbles=False,
    exactness=Exactness.lenient(math.exp(0.5)),
)


def plain_platform(model: Path, instances: int, folder: Path, kv_bytes: int = KV_BYTES) -> PlatformConfig:
    """Return a float32 platform on which only engine and gateway work."""
    return platform_of(PLAIN, model, instances, folder, kv_bytes)


def platform_of(
    system: System, model: Path, instances: int, folder: Path, kv_bytes: int = KV_BYTES
) -> PlatformConfig:
    """Return a float32 platform with the system's configuration."""
    return PlatformConfig(
        model=model.absolute(),
        instances=instances,
        folder=folder,
        instance_options=("--dtype=float32", f"--kv-cache-memory-bytes={kv_bytes}", *system.instance_options),
        bubble_options=system.bubble_options,
        gateway_options=system.gateway_options,
        reallocator_options=("--dtype=float32",) if system.reallocator else (),
        draft_stores=1 if system.drafts else 0,
        bubbles=system.bubbles,
        policy=system.policy,
        reallocator=system.reallocator,
        learner=system.learner,
    )


def each_left_out(everything: System) -> tuple[System, ...]:
    """Return the system without each of its mechanisms in turn; names begin with `without`."""

    def without(mechanism: str, about: str, **changes: object) -> System:
        return replace(everything, name=f"without {mechanism}", about=about, **changes)  # type: ignore[arg-type]

    options = everything.instance_options
    return (
        without(
            "pre-generation", "nothing is generated ahead; drafts come from earlier steps", bubbles=False
        ),
        without(
            "forks",
            "what is generated ahead has no forks at near-ties",
            instance_options=(*options, "--forks=0"),
        ),
        without(
            "history",
            "drafts come from what was pre-generated for the step, and from the step itself",
            gateway_options=(*everything.gateway_options, "--no-history"),
        ),
        without(
            "suffix index",
            "drafts of a sample are the cached rollout of its own seed only",
            instance_options=(*options, "--drafters=reference"),
        ),
        without(
            "references",
            "drafts come from the suffix index only, not from the cached rollout of the sample's own seed",
            instance_options=(*options, "--drafters=suffix"),
        ),
        without(
            "planner",
            "every draft is verified at its full length: the mode is fixed",
            instance_options=(
                *(each for each in options if "--speculation" not in each),
                "--speculation=fixed",
            ),
        ),
        without("reallocator", "samples stay where they began", reallocator=False),
        without("policy service", "no service sets knobs or watches the fleet", policy=False),
    )
