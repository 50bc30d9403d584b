"""A trainer of verl without the training: `.venv-verl/bin/python -P tests/support/verl_trainer.py ORDER ANSWER`.

verl's own configuration, server manager, clients and checkpoint manager run on Ray, against the gateway that the
order names (a file in JSON); only the worker that trains is a stand-in, which sends the weights of a folder. The
answer, in JSON, has what came back.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from safetensors.torch import load_file
from verl import DataProto
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineManager, CheckpointEngineRegistry
from verl.experimental.agent_loop import AgentLoopManager
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.rollout.base import BaseRollout, get_rollout_class
from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from paceline.integrations.verl import FleetSettings

PROMPT, OTHER = [1, 9, 17, 5], [1, 30, 31, 32, 33]
GREEDY = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
LONG = SAMPLED | {"max_tokens": 900, "ignore_eos": True}


class FolderTrainer(Worker):
    """Stands for verl's worker that trains; its weights after a step are those of the next folder."""

    def __init__(self, config: Any, folders: list[str]) -> None:
        super().__init__()
        self._folders = iter(folders)
        engine = omega_conf_to_dataclass(config.checkpoint_engine)
        self._engine = CheckpointEngineRegistry.new(
            engine.backend, is_master=self.rank == 0, bucket_size=1, **engine.engine_kwargs[engine.backend]
        )
        self._rollout = get_rollout_class(config.name, config.mode)(
            config=config, model_config=None, device_mesh=None
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> Any:
        """Send the weights, as verl's worker does."""
        weights = iter(load_file(Path(next(self._folders)) / "model.safetensors").items())
        if mode != "naive":
            return await self._engine.send_weights(weights, global_steps=global_steps)
        await self._rollout.resume(tags=["weights"])
        return await self._rollout.update_weights(
            weights, peft_config=None, base_sync_done=True, global_steps=global_steps
        )

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call the engine."""
        return getattr(self._engine, method)(*args, **kwargs)


def configuration(order: dict[str, Any]) -> Any:
    """The configuration of verl's trainer, with what a user would write on the command line."""
    rollout = "actor_rollout_ref.rollout"
    lines = [
        f"{rollout}.name=paceline",
        f"{rollout}.nnodes=1",
        f"{rollout}.n_gpus_per_node=1",
        f"{rollout}.tensor_model_parallel_size=1",
        f"{rollout}.prompt_length=64",
        f"{rollout}.response_length=32",
        f"{rollout}.checkpoint_engine.backend=paceline",
        f"{rollout}.temperature=1.0",
        f"{rollout}.calculate_log_probs=True",
        f"{rollout}.agent.num_workers=1",
        f"actor_rollout_ref.model.path={order['words']}",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        *(f"+{rollout}.engine_kwargs.paceline.{name}={value}" for name, value in order["settings"].items()),
        f"+{rollout}.checkpoint_engine.engine_kwargs.paceline=${{{rollout}.engine_kwargs.paceline}}",
    ]
    folder = Path(verl.__file__).parent / "trainer/config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer", overrides=lines)
    OmegaConf.resolve(config.actor_rollout_ref.rollout)
    return config


def differences(own: type, base: type) -> Iterator[str]:
    """Name what verl would call in vain: abstract methods, parameters that are not there, and ones too many."""
    yield from (f"{own.__name__}.{name} is abstract" for name in own.__abstractmethods__)
    for name, wanted in inspect.getmembers(base, inspect.isfunction):
        if name.startswith("_") or wanted is getattr(own, name):
            continue
        has = inspect.signature(getattr(own, name)).parameters
        asked = inspect.signature(wanted).parameters
        any_name = any(each.kind is each.VAR_KEYWORD for each in has.values())
        for each in asked.values():
            if each.name not in has and not any_name and each.kind is not each.VAR_KEYWORD:
                yield f"{own.__name__}.{name} lacks {each.name}"
        for each in has.values():
            if each.name not in asked and each.default is each.empty and each.kind < each.VAR_POSITIONAL:
                yield f"{own.__name__}.{name} needs {each.name}"
        if inspect.iscoroutinefunction(wanted) and not (
            inspect.iscoroutinefunction(getattr(own, name)) or inspect.isasyncgenfunction(getattr(own, name))
        ):
            yield f"{own.__name__}.{name} is not asynchronous"


def hooks() -> list[str]:
    pairs = (
        (RolloutReplicaRegistry.get("paceline"), RolloutReplica),
        (get_rollout_class("paceline"), BaseRollout),
        (CheckpointEngineRegistry.get("paceline"), CheckpointEngine),
    )
    return [difference for own, base in pairs for difference in differences(own, base)]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not holds():  # noqa: ASYNC110 - the fleet has to be asked
            await asyncio.sleep(0.02)


class Session:
    """What is done with one server manager."""

    def __init__(self, config: Any, manager: Any, settings: FleetSettings) -> None:
        self.manager = manager
        self.client = manager.get_client()
        self.resuming = manager.get_client(client_cls=FullyAsyncLLMServerClient)
        self._fleet = settings.client()

    async def ask(self, prompt: list[int], client: Any = None, **sampling: Any) -> dict[str, Any]:
        """Ask verl's client for a response."""
        output = await (client or self.client).generate(
            "a request", prompt_ids=prompt, sampling_params=sampling
        )
        found: dict[str, Any] = output.model_dump()
        return found

    async def refusal(self, prompt: list[int], images: Any = None, **sampling: Any) -> str:
        """Ask for what cannot be had; return the error."""
        try:
            await self.client.generate(
                "a request", prompt_ids=prompt, sampling_params=sampling, image_data=images
            )
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""

    async def begin(self, **options: Any) -> asyncio.Task[dict[str, Any]]:
        """Ask for a long response and return once tokens of it were sampled."""
        before = self._tokens()
        task = asyncio.create_task(self.ask(PROMPT, **LONG, **options))
        await until(lambda: self._tokens() > before)
        return task

    def _tokens(self) -> int:
        return sum(each.load.generated_tokens for each in self._fleet.instances())


async def conversations(config: Any, session: Session, order: dict[str, Any]) -> list[dict[str, Any]]:
    """Run verl's single-turn agents on a batch of its trainer; return prompts and responses without padding."""
    manager = await AgentLoopManager.create(config=config, llm_client=session.client)
    messages = np.empty(len(order["messages"]), dtype=object)
    messages[:] = order["messages"]
    batch = DataProto.from_dict(
        tensors={"nothing": torch.zeros(len(messages), 1)},
        non_tensors={"raw_prompt": messages},
        meta_info={"global_steps": 3},
    )
    found = (await manager.generate_sequences(batch)).batch
    width = found["prompts"].shape[1]
    rows = []
    for row in range(len(messages)):
        seen, own = found["attention_mask"][row].bool(), found["response_mask"][row].bool()
        rows.append(
            {
                "prompt": found["prompts"][row][seen[:width]].tolist(),
                "token_ids": found["responses"][row][own].tolist(),
                "log_probs": found["rollout_log_probs"][row][own].tolist(),
            }
        )
    return rows


async def aborted(session: Session) -> dict[str, Any]:
    """End a response in its middle; one that comes during the pause waits, or is sent away."""
    replica = session.manager.get_replicas()[0]
    running = await session.begin()
    await replica.abort_all_requests()
    partial = await running
    waiting = asyncio.create_task(session.ask(OTHER, **GREEDY))
    await asyncio.wait([waiting], timeout=0.2)
    waited = not waiting.done()
    await replica.resume_generation()
    after = await waiting
    await replica.abort_all_requests(reject_request=True)
    sent_away = await session.ask(OTHER, **GREEDY)
    await replica.resume_generation()
    return {"partial": partial, "waited": waited, "after": after, "sent_away": sent_away}


async def main(order: dict[str, Any]) -> dict[str, Any]:
    """Run all of it."""
    answer: dict[str, Any] = {"hooks": hooks()}
    config = configuration(order)
    rollout = config.actor_rollout_ref.rollout
    settings = FleetSettings.read(order["settings"], "order")
    session = Session(config, await LLMServerManager.create(config=config, start_rank=1), settings)
    answer["group"] = await asyncio.gather(*(session.ask(PROMPT, **SAMPLED) for _ in range(4)))
    *refused, answer["beside"] = await asyncio.gather(
        session.refusal(PROMPT, best_of=2),
        session.refusal(PROMPT, images=["an image"]),
        session.refusal([1, 99], **GREEDY),
        session.ask(OTHER, **GREEDY),
    )
    answer["refused"] = refused
    answer["conversations"] = await conversations(config, session, order)
    answer["aborted"] = await aborted(session)

    trainer = RayWorkerGroup(
        RayResourcePool([1], use_gpu=False, max_colocate_count=1),
        RayClassWithInitArgs(ray.remote(FolderTrainer), config=rollout, folders=order["folders"]),
        device_name="cpu",
    )
    engine = omega_conf_to_dataclass(rollout.checkpoint_engine)
    manager = CheckpointEngineManager(engine, trainer, session.manager.get_replicas())
    await session.manager.server_handles[0].set_global_steps.remote(6)
    # Some may be over before the update, and some begin after it.
    running = [await session.begin(client=session.resuming)]
    running += [asyncio.create_task(session.ask(PROMPT, session.resuming, **LONG)) for _ in range(7)]
    answer["metrics"] = await manager.update_weights(global_steps=7)
    answer["resumed"] = await asyncio.gather(*running)
    answer["pushed"] = await session.ask(OTHER, **GREEDY)

    hybrid = Session(config, await LLMServerManager.create(config=config, worker_group=trainer), settings)
    engine.backend = "naive"
    await CheckpointEngineManager(engine, trainer, hybrid.manager.get_replicas()).update_weights(
        global_steps=8
    )
    answer["hybrid"] = await hybrid.ask(OTHER, **GREEDY)
    return answer


if __name__ == "__main__":
    order = json.loads(Path(sys.argv[1]).read_text())
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
    try:
        answer = asyncio.run(main(order))
    finally:
        ray.shutdown()
    Path(sys.argv[2]).write_text(json.dumps(answer))
