"""Bodies of what vLLM's server has beside generation. Pure."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from services.facade.dialects.asked import Limits
from services.facade.dialects.parameters import Body, check_unsupported
from services.facade.text import Tokenizer


class UpdateBody(Body):
    """Body of /update_weights, as prime-rl sends it."""

    weight_dir: str
    """Folder of the weights, as the instances see it."""

    def prepare(self, tokenizer: Tokenizer | None, limits: Limits | None) -> None:
        """Check the parameters that have no field."""
        check_unsupported(self, {"reset_prefix_cache": (True, False)})


class AbortRequestsBody(Body):
    """Body of /abort_requests."""

    request_ids: list[str] = Field(max_length=65536)
    """Names of requests, `request_id` in their bodies."""


def models(name: str, max_model_len: int) -> dict[str, Any]:
    """Return the list of models: the one that is served."""
    model = {"id": name, "object": "model", "created": 0, "owned_by": "paceline", "root": name}
    return {"object": "list", "data": [{**model, "max_model_len": max_model_len}]}
