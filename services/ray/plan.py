"""Which actors there are, and what each of them runs. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.ray.config import RayConfig


@dataclass(frozen=True, slots=True)
class ActorPlan:
    """One actor. `resources` as Ray counts them; `spread` away from others of its kind."""

    name: str
    module: str
    flags: tuple[str, ...]
    cpus: float = 0.0
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)
    spread: bool = False


def actors(config: RayConfig) -> list[ActorPlan]:
    """All of them, in the order in which they are started; they are stopped the other way round."""
    plans = [
        ActorPlan(f"drafts-{n}", "services.drafts", ("--port=0", f"--replica-id=drafts-{n}"))
        for n in range(config.draft_stores)
    ]
    wanted = {"bubbles": config.bubbles, "policy": config.policy, "reallocator": config.reallocator}
    plans += [_helper(name) for name, on in wanted.items() if on]
    if config.learner:
        plans.append(_learner(config))
    plans += [_instance(config, n) for n in range(config.instances)]
    plans.append(_gateway(config))
    return plans


def _helper(name: str) -> ActorPlan:
    return ActorPlan(name, f"services.{name}", ("--port=0", f"--instance-id={name}"))


def _learner(config: RayConfig) -> ActorPlan:
    flags = (
        *("--port=0", "--instance-id=drafter"),
        *(f"--model={config.model}", f"--folder={config.drafters}", f"--checkpoint={config.drafter}"),
        f"--device={'cuda' if config.learner_gpus else 'cpu'}",
        *config.learner_flags,
    )
    return ActorPlan("drafter", "services.drafter", flags, gpus=config.learner_gpus)


def _instance(config: RayConfig, number: int) -> ActorPlan:
    name = f"instance-{number}"
    flags = [f"--model={config.model}", f"--instance-id={name}"]
    gpus = config.gpus
    if config.executor == "ray":
        # vLLM asks Ray for the GPUs itself; the actor must not hold them.
        flags.append("--executor=ray")
        gpus = 0.0
    if config.drafter:
        flags.append(f"--eagle3={config.drafter}")
    if config.gpus > 1:
        flags.append(f"--tensor-parallel-size={int(config.gpus)}")
    return ActorPlan(
        name,
        "services.generation",
        (*flags, *config.instance_flags),  # the last of equal flags counts
        cpus=config.cpus,
        gpus=gpus,
        spread=True,
    )


def _gateway(config: RayConfig) -> ActorPlan:
    # A trifle of it: the node that has it is meant, not an amount.
    resources = {config.gateway_resource: 0.001} if config.gateway_resource else {}
    flags = (f"--port={config.port}", *config.gateway_flags)
    return ActorPlan("gateway", "services.gateway", flags, resources=resources)
