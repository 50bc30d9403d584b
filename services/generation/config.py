"""Configuration of a generation instance."""

from __future__ import annotations

import socket
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from services.contracts.drafters import NAME, OWN, selectable
from services.contracts.modes import OFF, ModeOrOff, described
from services.generation.engine.draft_models.kinds import KINDS
from services.generation.engine.environment import parallelism_refusal
from services.generation.engine.types import Eagle3Options, EngineOptions, W4Options
from services.platform.config import Port, ServiceConfig

_W4_GROUPS = (32, 64, 128, 256)
DrafterName = Annotated[str, Field(pattern=NAME)]


class GenerationConfig(ServiceConfig):
    """One generation instance. Lengths in tokens, memory in bytes, times in seconds."""

    model: str
    """Folder of the model in Hugging Face layout."""
    instance_id: str = Field(default_factory=socket.gethostname)
    """Stable name of the instance; a process that comes back under it gets a new epoch."""
    initial_version: int = Field(default=0, ge=0)
    """Policy version of the weights in `model`."""
    weights_root: Path | None = None
    """Folder that the weights of an update must be in, symbolic links followed. Unset: they may be in any."""
    adopted_weights: Path | None = None
    """Folder that the instance may write to, in which it keeps the weights of an update: pushed weights, and by
    hard link or copy the weights of a trainer's folder, so that the trainer may remove its folder once the update
    is published. Instances may share it. Unset: nothing can be pushed to the instance, and a trainer's folder has
    to stay until it is superseded."""
    update_room: Literal["check", "off"] = "check"
    """check: an instance whose machine has too little memory or disk for any update of the weights does not start,
    and one that may run short logs a warning. off: start all the same."""
    weight_piece_bytes: int = Field(default=1024 * 1024, ge=1024, le=8 * 1024 * 1024)
    """Bytes of pushed weights that are sent at a time to the next instance."""
    weight_stall_seconds: float = Field(default=3.0, gt=0, allow_inf_nan=False)
    """Time after which an instance that has weights and sends none is given up for the next nearest."""
    weight_idle_seconds: float = Field(default=120.0, gt=0, allow_inf_nan=False)
    """Time without any bytes after which pushed weights are given up."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: the model's own."""
    max_num_seqs: int | None = Field(default=None, ge=1)
    """Samples that run at once. Default: vLLM's for the device, 1024 on an H100, 256 on an A100 or on CPU."""
    max_waiting: int = Field(default=1024, ge=0)
    """Samples that may wait in the engine before new ones are refused."""
    max_model_len: int | None = Field(default=None, ge=1)
    """Prompt and response together. Default: the model's own limit."""
    max_num_batched_tokens: int | None = Field(default=None, ge=1)
    """Tokens in one engine step. Default: vLLM's for the device, 16384 on an H100, 8192 on an A100,
    4096 on CPU."""
    kv_cache_memory_bytes: int | None = Field(default=None, ge=1)
    """Memory for KV. Default: what vLLM finds free."""
    gpu_memory_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of GPU memory for weights and KV together, where kv_cache_memory_bytes is not set. Default: vLLM's,
    0.92."""
    block_size: int | None = Field(default=None, ge=1)
    """Tokens in a KV block. Default: vLLM's."""
    enable_prefix_caching: bool = True
    """Share the KV of common prefixes, such as a group's prompt."""
    enforce_eager: bool | None = None
    """Run without CUDA graphs. Default: on CPU only."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that one instance spans."""
    enable_expert_parallel: bool = False
    """Divide a mixture of experts among the devices by whole experts, in place of each expert's weights. For
    tensor_parallel_size above 1."""
    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Stages of a pipeline: only 1. An instance steps one batch at a time."""
    data_parallel_size: int = Field(default=1, ge=1)
    """Replicas within one engine: only 1. Instances are the replicas."""
    batch_invariant: bool = False
    """Logits do not depend on what else is in the batch, so there are no near-ties between instances of one kind.
    Slower. On CUDA it is vLLM's mode, from compute capability 8.0 on. On CPU it is for Llama, Qwen2 and Qwen3."""
    executor: Literal["local", "ray"] = "local"
    """local: use the devices of this machine. ray: vLLM places its workers on the Ray cluster that
    RAY_ADDRESS names, for an instance that spans machines. CUDA only."""
    engine: Literal["auto", "v1", "v2"] = "auto"
    """vLLM's model runner. auto: v1, until v2 has been measured to be faster on a GPU. v2: samples and verifies on
    the device; it has no draft models, and no samples that are LENIENT or verified by rejection. On CPU it is for
    tests only (Triton's interpreter)."""
    schedule_ahead: bool = True
    """On engine v2: schedule a step while the device runs the previous one. Engine v1 ignores it."""
    kernels: Literal["auto", "triton", "reference"] = "auto"
    """auto: Triton kernels on CUDA, if they compile and give the right tokens, and the references elsewhere.
    triton: an instance that cannot use them does not start. reference: never."""
    flush_interval_seconds: float = Field(default=0.05, gt=0)
    """Interval of reports: of ends of samples, and of new tokens of samples whose caller reads along."""
    checkpoint_tokens: int = Field(default=512, ge=1)
    """Number of new tokens after which a sample of a batch reports. Tokens that a lost instance has not reported
    are generated again, and are the same."""
    checkpoint_seconds: float = Field(default=5.0, gt=0, allow_inf_nan=False)
    """Time after its last report at which it also reports. A fifth of this, at most 1 s, lies between two
    messages."""
    step_timeout_seconds: float = Field(default=300, gt=0)
    """Longest time of an engine step. A longer one means a hung device: heartbeats stop and the process ends."""
    command_timeout_seconds: float = Field(default=900, gt=0)
    """The same for a command between two steps, with samples in the engine or without: weights that are applied,
    moves, sleep. The longest is to apply the weights of the largest model."""
    evacuation_seconds: float = Field(default=10.0, ge=0, allow_inf_nan=False)
    """Time for a reallocator to move the samples away, once the instance is to stop or to drain; then the remaining
    samples are handed back. Without a registered reallocator they are handed back at once."""
    speculation: ModeOrOff = Field(
        default="planner",
        description=f"Drafts that a step verifies; knobs can change the mode. {described()}."
        " off: none, whatever the knobs say.",
    )
    draft_check: bool = True
    """Check before serving, on a few tokens, that drafts do not change what the model says; where they do, the
    instance decodes plainly. A second for a model of 70B."""
    sweep_seconds: float = Field(default=2.0, ge=0, le=600, allow_inf_nan=False)
    """Time in which the instance measures its own step times before it serves, without prefill; with prefill the
    sweep takes at most four times as long. 0: it learns step times as it serves."""
    calibration: Path | None = None
    """Sweep saved by `paceline calibrate`, or a folder of them, which takes the place of that measurement where it
    is of the same device, tensor parallelism, model and dtype."""
    assumed_step_times: Path | None = None
    """Sweep of any device: the instance plans as if it were that device, whatever its own steps take, to show what
    would be planned there. Unset: it plans by its own measurements."""
    step_log: Path | None = None
    """Folder in which the instance writes the shape of each engine step, to predict its time on other devices."""
    draft_margin: float = Field(default=0.02, ge=0, allow_inf_nan=False)
    """Least gain over plain decoding, as a share, for which the planner verifies drafts."""
    drafters: tuple[DrafterName, ...] = tuple(name for name, each in OWN.items() if each.by_default)
    """Drafters in addition to the draft models: Paceline's own, and those that installed packages register."""
    drafter_options: dict[str, dict[str, Any]] = Field(default_factory=dict)
    """Options of drafters that have any, by the drafter's name."""
    drafter_seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Longest time of a call of a drafter of another package. After three slower ones it is switched off."""
    pool: str = ""
    """Name of the pool that the instance belongs to; knobs can be set for one."""
    quantized: bool = False
    """Keep a quantized (4-bit) copy of the weights; it drafts where other drafts are worse and its steps pay."""
    quantized_group: int = 128
    """Weights of the copy that share a scale: 32, 64, 128 or 256; must divide the inputs of every linear layer."""
    quantized_tokens: int = Field(default=8, ge=1, le=64)
    """Most tokens that the copy drafts for a sample in one step. As many KV slots are kept ahead of each sample."""
    eagle3: Path | None = None
    """Folder of an EAGLE-3 head for the model, to start with: it drafts where other drafts are worse and its steps
    pay. The head that the drafter service has published replaces it. The hidden states that it reads are kept with
    the KV, which grows by them: by 19 % for an 8B model of 36 layers. Unset: there is none."""
    eagle3_tokens: int = Field(default=6, ge=1, le=64)
    """Most tokens that the head drafts for a sample in one step. As many KV slots are kept ahead of each sample."""
    eagle3_catch_up_tokens: int = Field(default=2048, ge=1)
    """Most tokens that the head reads before one step, to catch up with samples that were decoded without it."""
    pregenerate: bool = True
    """Generate samples of coming steps in bubbles, as the coordinator of bubbles says. Needs `drafts`."""
    background_threshold: int = Field(default=0, ge=0)
    """Number of samples of the current step up to which samples of coming steps are generated at the same time;
    0: only when there are none."""
    forks: int = Field(default=4, ge=0)
    """Most forks of a pre-generated sample, at its nearest ties: a fork takes the runner-up there and continues, in
    case the updated policy chooses it. 0: none."""
    fork_margin: float = Field(default=0.1, gt=0, allow_inf_nan=False)
    """Margin of a near-tie, in nats: forks begin where the runner-up lost by less."""
    fork_slowdown: float = Field(default=0.05, ge=0, allow_inf_nan=False)
    """Most time that forks add to the engine steps of pre-generation, as a share."""
    sleep_mode: bool = False
    """Keep the weights in host memory while the trainer has the device. CUDA only: on CPU just KV is dropped."""
    draft_window: int = Field(default=16, ge=1, le=128)
    """Most draft tokens of a sample in one step."""
    max_branches: int = Field(default=0, ge=0, le=8)
    """Most alternatives that the suffix drafter proposes in addition to a sample's draft, each with its
    continuation. The ones that pay are verified with the draft as a tree, within draft_window. In mode planner. 0:
    drafts are chains."""
    draft_floor: float = Field(default=0.3, ge=0, le=1)
    """Proposals whose first token is less likely to be accepted than this are left out."""
    survival_floor: float = Field(default=0.1, ge=0, le=1)
    """Proposals are cut where a token is less likely than this to be reached and accepted."""
    drafts: bool = True
    """Look for rollouts of the samples' prompts in the draft store, where there is one."""
    draft_cache_bytes: int = Field(default=256 * 1024 * 1024, ge=0)
    """Memory for rollouts from the draft store and of the instance's own."""
    draft_fetch_seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Longest time that the draft store has to answer; after a timeout it is not queried for a while."""
    draft_wait_seconds: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Longest time that a LENIENT sample waits for its cached rollout; then it starts without one."""
    draft_index_tokens: int = Field(default=4_000_000, ge=1)
    """Tokens that the index of the suffix drafter holds, some 100 bytes each. A sample without room gets no drafts
    from it."""
    draft_index_step_tokens: int = Field(default=4096, ge=1)
    """Tokens of arriving rollouts that are put into that index with one engine step."""
    lenient_drafts: bool = False
    """LENIENT samples take over no cached rollout: draft tokens of pre-generated rollouts are accepted with
    probability min(1, lenience * p_now / p_then) instead, others as by REJECTION: BubbleSpec's rule. Lossy, too."""
    reuse_chunk: int = Field(default=128, ge=1, le=128)
    """Most tokens of its cached rollout that a LENIENT sample verifies in one step, whatever `speculation` says."""
    migration_port: Port = 0
    """Port that receives the KV of moved samples; further ranks have the ports that follow. 0: any free ports."""
    migration_transport: Literal["tcp", "nixl"] = "tcp"
    """Transport of the KV of moved samples. nixl needs the package of that name, on every instance."""
    migration_timeout_seconds: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Longest time that moving a sample may take, unless the caller sets another; then it stays."""
    migration_stall_seconds: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    """Longest time that a sample is paused while the rest of its KV is sent, and as long again until
    the receiver has it."""
    migration_claim_seconds: float = Field(default=10.0, gt=0, allow_inf_nan=False)
    """Time after which a moved sample that no gateway has claimed is given up."""
    migration_outgoing: int = Field(default=4, ge=1)
    """Most samples that leave at the same time."""
    migration_incoming: int = Field(default=8, ge=1)
    """Most samples that arrive at the same time."""
    migration_connections: int = Field(default=64, ge=1)
    """Most open connections to the port for KV; more than the samples that arrive at the same time. Beyond it, the
    oldest connection that has not identified itself is closed."""
    migration_chunk_bytes: int = Field(default=8 * 1024 * 1024, ge=1)
    """Bytes of KV that are packed and sent at a time."""
    threads_bind: str | None = None
    """CPU cores that the CPU engine's threads are bound to, such as 0 or 0-3."""

    @field_validator("quantized_group")
    @classmethod
    def _known_group(cls, group: int) -> int:
        if group not in _W4_GROUPS:
            raise ValueError(f"allowed are {', '.join(map(str, _W4_GROUPS))}")
        return group

    @field_validator("drafters")
    @classmethod
    def _registered(cls, drafters: tuple[str, ...]) -> tuple[str, ...]:
        if set(drafters) <= {name for name, each in OWN.items() if each.by_default}:
            # Without a look at what is installed, which takes some milliseconds.
            return tuple(dict.fromkeys(drafters))
        known = selectable()
        if unknown := [name for name in drafters if name not in known]:
            raise ValueError(
                f"{', '.join(unknown)}: no such drafter is installed; allowed are {', '.join(known)}"
            )
        return tuple(dict.fromkeys(drafters))

    @model_validator(mode="after")
    def _buildable(self) -> Self:
        if self.engine == "v2" and (models := [kind.name for kind in KINDS if getattr(self, kind.name)]):
            raise ValueError(f"engine v2 has no draft models: {' and '.join(models)} must not be set")
        if idle := self.drafter_options.keys() - {*self.drafters}:
            raise ValueError(f"drafter_options: {', '.join(sorted(idle))} is not among the drafters")
        if self.engine == "v2" and self.lenient_drafts:
            raise ValueError("engine v2 verifies no draft by its record: lenient_drafts must not be set")
        option, reason = parallelism_refusal(
            tensor=self.tensor_parallel_size,
            experts=self.enable_expert_parallel,
            pipeline=self.pipeline_parallel_size,
            data=self.data_parallel_size,
        )
        if option:
            raise ValueError(f"{option}: {reason}")
        return self

    @property
    def steps_ahead(self) -> int:
        """Steps that are scheduled before the outcome of an earlier one is known."""
        return int(self.engine == "v2" and self.schedule_ahead)

    def engine_options(self) -> EngineOptions:
        """Return the part that the engine is built from."""
        own = {*(kind.name for kind in KINDS), "draft_window", "trees", "step_log"}
        passed = {each.name for each in fields(EngineOptions)} - own
        return EngineOptions(
            **self.model_dump(include=passed),
            draft_window=0 if self.speculation == OFF else self.draft_window,
            trees=self.max_branches > 0 and self.speculation != OFF,
            step_log=None if self.step_log is None else self.step_log / f"{self.instance_id}.jsonl",
            quantized=W4Options(self.quantized_group, self.quantized_tokens)
            if self.quantized and self.speculation != OFF
            else None,
            eagle3=Eagle3Options(str(self.eagle3), self.eagle3_tokens, self.eagle3_catch_up_tokens)
            if self.eagle3 is not None and self.speculation != OFF
            else None,
        )
