"""Settings of the HTTP facade."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from paceline.tokens import TokenScope
from paceline.transport.channel import is_loopback
from paceline.types import LogprobsMode
from services.platform.config import ServiceConfig


class GenerationDefaults(StrEnum):
    """Source of the sampling parameters that a request leaves out, under the names of vLLM's option."""

    VLLM = "vllm"
    AUTO = "auto"


class FacadeConfig(ServiceConfig):
    """Settings of the HTTP facade; services.platform.config has those that all services share."""

    port: int = Field(default=7480, ge=0, le=65535)
    """Port of the HTTP server; 0 picks a free one."""
    gateway: str = "127.0.0.1:7400"
    """host:port of the gateway, or several with commas between, of which one leads."""
    model: Path | None = None
    """Folder with the tokenizer of the model that is served. Unset: prompts must be token ids, and answers have no
    text."""
    served_model_name: str | None = None
    """Name of the model in requests and answers. Unset: the one that the instances report."""
    run_id: str = Field(default="http", min_length=1, max_length=256)
    """Run of the requests that name none in the header X-Paceline-Run, unless their token is for other runs: then
    the first that this names in full."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    """Log-probabilities of vLLM's dialect: raw, as vLLM by default, or processed: after temperature, masks and
    penalties, as TRL asks of vLLM. SGLang's dialect has processed ones."""
    generation_config: GenerationDefaults = GenerationDefaults.VLLM
    """Sampling parameters of vLLM's dialect that a request leaves out: `vllm`, those that leave the policy as it
    is, or `auto`, those in the model's `generation_config.json`, as vLLM's server has by default."""
    alone: bool = True
    """Whether callers reach no other facade under the same address. False: what concerns the requests of one,
    such as pauses and aborts, is refused."""
    max_samples_per_request: int = Field(default=4096, ge=1)
    """Most samples of one request: prompts times n."""
    max_hinted_samples: int = Field(default=262_144, ge=1)
    """Most samples of one hint: prompts times n."""
    forecast_prompts: int = Field(default=65_536, ge=0)
    """Prompts that are remembered, to announce the next step of a trainer that goes through them in the same order
    every epoch; its epoch must not have more. 0: nothing is announced. Needs `alone`."""
    max_concurrent_samples: int = Field(default=16384, ge=1)
    """Most samples in work at once; above it requests are answered 429 with the time to wait."""
    trust_request_chat_template: bool = False
    """Whether a request may bring a chat template of its own. It is a program, which may keep a worker busy for
    `work_seconds`."""
    workers: int | None = Field(default=None, ge=3, le=64)
    """Processes that read large bodies, tokenize and write large answers. Unset: one a core, at least 3 and at most
    4. They share the memory of one tokenizer."""
    work_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Deadline of each piece of such work; its process is killed when it passes, and the request answered 504."""
    work_memory_bytes: int = Field(default=768 * 1024 * 1024, ge=64 * 1024 * 1024)
    """Most memory that such work may take beside the tokenizer; a request that needs more is answered 400."""
    max_waiting_work: int = Field(default=16384, ge=1)
    """Most pieces of such work that wait for a process; of more, each is answered 429 with the time to wait."""
    max_request_seconds: float = Field(default=14400.0, gt=0, allow_inf_nan=False)
    """Deadline of a request; 504 after it."""
    retry_seconds: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """Seconds for which a gateway that is full or cannot be reached is tried again."""
    anonymous_scopes: frozenset[TokenScope] = frozenset()
    """Scopes of callers that send no token, for trainers that cannot send one. Only on loopback, as in a container
    beside the trainer, or with `insecure`."""

    allowed_hosts: frozenset[str] = frozenset()
    """Names, in the header Host, under which callers without a token may reach this besides loopback and
    `advertise_host`, such as rollouts.example.com or *.example.com; * for any. A web page whose own name leads here
    is kept out by this."""
    max_connections_per_address: int | None = Field(default=None, ge=1)
    """Connections of one address, or of 64 bits of IPv6, at once. Unset: three quarters of `max_connections`.
    Behind a proxy set it to all of them."""
    header_seconds: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    """Seconds that a new connection has for its first request, and any for a header once it has begun."""
    body_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds for the body of a request. One that comes with more than 64 KiB/s has longer."""
    reader_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds for which an answer waits for a client that does not read it."""

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.anonymous_scopes and not self.insecure and not is_loopback(self.host):
            raise ValueError(f"anonymous_scopes: on {self.host} needs insecure; anybody may connect there")
        if TokenScope.INTERNAL in self.anonymous_scopes:
            raise ValueError("anonymous_scopes: internal is for services only")
        if self.generation_config is GenerationDefaults.AUTO and self.model is None:
            raise ValueError("generation_config: auto needs model, the folder that has them")
        return self
