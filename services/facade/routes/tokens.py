"""Routes of vLLM's endpoints for tokens, which prime-rl and SkyRL use."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.facade.dialects import tokens, vllm
from services.facade.dialects.parameters import check_token_ids, check_unsupported, checked_count, run_seed
from services.facade.names import SamplesAsked
from services.facade.routes.checked import checked_router
from services.facade.serving import EventResponse, EventStream, Facade
from services.facade.text import needs_text


def tokens_routes(facade: Facade) -> APIRouter:
    """Return the routes for tokens."""
    router = checked_router("vLLM and OpenAI")

    @router.post("/inference/v1/generate", response_model=None)
    async def generate(body: tokens.TokensBody, request: Request) -> Response:
        """Generate samples of one prompt, from token ids to token ids."""
        sampling = body.sampling_params
        check_unsupported(body, tokens.NEUTRAL)
        check_unsupported(sampling, tokens.NEUTRAL_SAMPLING, "sampling_params.")
        request_id = body.request_id or uuid.uuid4().hex
        model = await facade.fleet.check_model(body.model)
        writer = tokens.TokensWriter(body, request_id, (int(time.time()), model.name))
        asked = SamplesAsked(
            [body.token_ids],
            checked_count(sampling.n, "sampling_params.n"),
            vllm.sampling_of(sampling, sampling.max_tokens, facade.config.logprobs_mode),
            run_seed(sampling.seed, "sampling_params.seed"),
            "sampling_params.seed",
        )
        requests = await facade.requests(request, asked, tokens.NAMES)
        if body.stream:
            events = EventStream(writer.events, writer.last_events)
            return EventResponse(facade, request, requests, "vllm", events, request_id)
        outputs = await facade.outputs(request, requests, "vllm", request_id)
        return await facade.answer(outputs, lambda: writer.whole(outputs))

    @router.post("/tokenize")
    async def tokenize(body: tokens.TokenizeBody) -> dict[str, Any]:
        """Return the tokens of a text."""
        check_unsupported(body, {"return_token_strs": (False,)})
        model = await facade.fleet.check_model(body.model)
        found = needs_text(facade.tokenizer, "prompt").encode(body.prompt, body.add_special_tokens)
        return {"tokens": found, "count": len(found), "max_model_len": model.max_model_len}

    @router.post("/detokenize")
    async def detokenize(body: tokens.DetokenizeBody) -> dict[str, str]:
        """Return the text of tokens, with special ones."""
        check_unsupported(body, {})
        model = await facade.fleet.check_model(body.model)
        check_token_ids(body.tokens, model.vocab_size, "tokens")
        return {"prompt": needs_text(facade.tokenizer, "tokens").decode(body.tokens, skip_special=False)}

    return router
