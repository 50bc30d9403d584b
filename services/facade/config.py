"""Settings of the HTTP facade."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from paceline.tokens import TokenScope
from paceline.transport.channel import is_loopback
from paceline.types import LogprobsMode
from services.platform.config import Port, ServiceConfig


class GenerationDefaults(StrEnum):
    """Source of the sampling parameters that a request leaves out, under the names of vLLM's option."""

    VLLM = "vllm"
    AUTO = "auto"


class FacadeConfig(ServiceConfig):
    """Settings of the HTTP facade, in addition to the shared ones of services.platform.config."""

    port: Port = 7480
    """Port of the HTTP server; 0 picks a free one."""
    gateway: str = "127.0.0.1:7400"
    """host:port of the gateway, or several, separated by commas, of which one leads."""
    model: Path | None = None
    """Folder with the tokenizer of the served model. Unset: prompts must be token ids, and answers have no text."""
    served_model_name: str | list[str] | None = None
    """Names of the model in requests, several as a list or separated by commas. Answers have the first one. Unset:
    the name that the instances report."""
    run_id: str = Field(default="http", min_length=1, max_length=256)
    """Run of requests without the header X-Paceline-Run, unless their token is for other runs: then the first run
    that the token names in full."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    """Log-probabilities of vLLM's dialect: raw, the default of vLLM, or processed, after temperature, masks and
    penalties, as TRL requests them from vLLM. SGLang's dialect has processed ones."""
    generation_config: GenerationDefaults = GenerationDefaults.VLLM
    """Sampling parameters of vLLM's dialect for requests that leave them out: `vllm`, which leaves the policy
    unchanged, or `auto`, from the model's `generation_config.json`, the default of vLLM's server."""
    alone: bool = True
    """True: callers reach no other facade under the same address. False: requests that concern one facade, such as
    pauses and aborts, are refused."""
    max_samples_per_request: int = Field(default=4096, ge=1)
    """Most samples of one request: prompts times n."""
    max_hinted_samples: int = Field(default=262_144, ge=1)
    """Most samples of one hint: prompts times n."""
    forecast_prompts: int = Field(default=65_536, ge=0)
    """Most prompts that are remembered, to announce the next step of a trainer that uses the same order in every
    epoch; its epoch must not have more. 0: nothing is announced. Needs `alone`."""
    max_concurrent_samples: int = Field(default=16384, ge=1)
    """Most concurrent samples; above it requests are answered 429 with the time to wait."""
    trust_request_chat_template: bool = False
    """True: a request may include its own chat template. It is a program, which may keep a worker busy for
    `work_seconds`."""
    workers: int | None = Field(default=None, ge=3, le=64)
    """Worker processes, which read large bodies, tokenize and write large answers. Unset: one a core, from 3 to
    4. They share the memory of one tokenizer."""
    work_seconds: float = Field(default=30.0, gt=0, allow_inf_nan=False)
    """Deadline of each job of a worker. When it passes, the worker is killed and the request answered 504."""
    work_memory_bytes: int = Field(default=768 * 1024 * 1024, ge=64 * 1024 * 1024)
    """Most memory of a job in addition to the tokenizer; a request that needs more is answered 400."""
    max_waiting_work: int = Field(default=16384, ge=1)
    """Most jobs that wait for a worker; further requests are answered 429 with the time to wait."""
    max_request_seconds: float = Field(default=14400.0, gt=0, allow_inf_nan=False)
    """Deadline of a request; 504 after it."""
    retry_seconds: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """Seconds for which calls to a full or unreachable gateway are retried."""
    anonymous_scopes: frozenset[TokenScope] = frozenset()
    """Scopes of callers without a token, for trainers that cannot send one. Only on loopback, as in a container
    next to the trainer, or with `insecure`."""

    allowed_hosts: frozenset[str] = frozenset()
    """Names, in the header Host, under which callers without a token may reach this besides loopback and
    `advertise_host`, such as rollouts.example.com or *.example.com; * for any. This
    keeps out web pages whose own name resolves to this host."""
    max_connections_per_address: int | None = Field(default=None, ge=1)
    """Most connections of one address, or of 64 bits of IPv6. Unset: three quarters of `max_connections`. Behind a
    proxy, set it to `max_connections`."""
    header_seconds: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    """Seconds for the first request of a new connection, and for any header once it has begun."""
    body_seconds: float = Field(default=60.0, gt=0, allow_inf_nan=False)
    """Seconds for the body of a request, or longer if it arrives faster than 64 KiB/s."""
    reader_seconds: float = Field(default=600.0, gt=0, allow_inf_nan=False)
    """Seconds for which an answer waits for a slow reader."""

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the model in requests, in the order given; empty: the name that the instances report."""
        given = self.served_model_name or ()
        return tuple(each.strip() for each in (given.split(",") if isinstance(given, str) else given))

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if self.anonymous_scopes and not self.insecure and not is_loopback(self.host):
            raise ValueError(f"anonymous_scopes: on {self.host} needs insecure; anybody may connect there")
        if TokenScope.INTERNAL in self.anonymous_scopes:
            raise ValueError("anonymous_scopes: internal is for services only")
        if self.generation_config is GenerationDefaults.AUTO and self.model is None:
            raise ValueError("generation_config: auto needs model, the folder that has them")
        if not all(self.model_names):
            raise ValueError(
                "served_model_name: a name is empty; leave the setting out for the instances' name"
            )
        return self
