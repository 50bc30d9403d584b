"""Routes of vLLM's endpoints for tokens, which prime-rl and SkyRL use."""

from __future__ import annotations

import time
import uuid
from functools import partial

from fastapi import APIRouter, Request
from starlette.responses import Response

from services.facade.dialects import tokens
from services.facade.routes.worked import worked_router
from services.facade.serving import EventResponse, EventStream, Facade


def tokens_routes(facade: Facade) -> APIRouter:
    """Return the routes for tokens."""
    router = worked_router(facade, "vLLM and OpenAI")

    @router.post("/inference/v1/generate", response_model=None)
    async def generate(body: tokens.TokensBody, request: Request) -> Response:
        """Generate samples of one prompt, from token ids to token ids."""
        request_id, model = body.request_id or uuid.uuid4().hex, await facade.fleet.model()
        head = (int(time.time()), model.name)
        requests = await facade.requests(request, body.asked)
        if body.stream:
            writer = tokens.TokensWriter(body, request_id, head)
            events = EventStream(writer.events, writer.last_events)
            return EventResponse(facade, request, requests, "vllm", events, request_id)
        outputs = await facade.outputs(request, requests, "vllm", request_id)
        return await facade.answer(request, outputs, partial(tokens.whole_answer, body, request_id, head))

    @router.post("/tokenize", response_model=None)
    async def tokenize(body: tokens.TokenizeBody) -> Response:
        """Return the tokens of a text."""
        return Response(body.answer, media_type="application/json")

    @router.post("/detokenize", response_model=None)
    async def detokenize(body: tokens.DetokenizeBody) -> Response:
        """Return the text of tokens, with special ones."""
        return Response(body.answer, media_type="application/json")

    return router
