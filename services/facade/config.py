"""Settings of the HTTP facade."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from paceline.address import is_loopback
from paceline.tokens import TokenScope
from paceline.types import LogprobsMode
from services.platform.config.settings import ServiceConfig


class FacadeConfig(ServiceConfig):
    """Settings of the HTTP facade; services.platform.config.settings has those that all services share."""

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
    """Run of the requests that name none in the header X-Paceline-Run."""
    logprobs_mode: LogprobsMode = LogprobsMode.RAW
    """Log-probabilities of vLLM's dialect: raw, as vLLM by default, or processed: after temperature, masks and
    penalties, as TRL asks of vLLM. SGLang's dialect has processed ones."""
    alone: bool = True
    """Whether callers reach no other facade under the same address. False: what concerns the requests of one,
    such as pauses and aborts, is refused."""
    max_samples_per_request: int = Field(default=4096, ge=1)
    """Most samples of one request: prompts times n."""
    max_hinted_samples: int = Field(default=262_144, ge=1)
    """Most samples of one hint: prompts times n."""
    max_concurrent_samples: int = Field(default=16384, ge=1)
    """Most samples in work at once; above it requests are answered 429 with the time to wait."""
    max_request_seconds: float = Field(default=14400.0, gt=0, allow_inf_nan=False)
    """Deadline of a request; 504 after it."""
    retry_seconds: float = Field(default=30.0, ge=0, allow_inf_nan=False)
    """Seconds for which a gateway that is full or cannot be reached is tried again."""
    anonymous_scopes: frozenset[TokenScope] = frozenset()
    """Scopes of callers that send no token, for trainers that cannot send one. Only on loopback, as in a container
    beside the trainer, or with `insecure`."""

    @model_validator(mode="after")
    def _check_anonymous(self) -> Self:
        if self.anonymous_scopes and not self.insecure and not is_loopback(self.host):
            raise ValueError(f"anonymous_scopes: on {self.host} needs insecure; anybody may connect there")
        if TokenScope.INTERNAL in self.anonymous_scopes:
            raise ValueError("anonymous_scopes: internal is for services only")
        return self
