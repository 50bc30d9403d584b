"""Routes of vLLM's server, OpenAI's API and TRL's own server, and vLLM's endpoints for tokens.

prime-rl and SkyRL use the endpoints for tokens.
"""

from __future__ import annotations

import time
import uuid
from functools import partial
from typing import Literal

from fastapi import APIRouter, Request
from starlette.responses import Response

from paceline import types as t
from services.facade.dialects import answers, chat, forms, tokens, trl, vllm
from services.facade.dialects.forms import answered
from services.facade.gateway import Updates
from services.facade.serving import EventResponse, Facade, body_router
from services.facade.work.jobs import write_whole


def vllm_routes(facade: Facade, updates: Updates) -> APIRouter:
    """Return the routes for completions, chat, updates and TRL."""
    router = body_router(facade, "vLLM and OpenAI")
    _control(router, facade, updates)

    @router.get("/v1/models")
    async def models() -> forms.ModelsForm:
        """Return the served model, once under each of its names."""
        model = await facade.fleet.model()
        return vllm.models(model.names, model.max_model_len)

    @router.post(
        "/v1/completions", response_model=None, responses=answered(forms.CompletionForm, streams=True)
    )
    async def complete(body: vllm.CompletionBody, request: Request) -> Response:
        """Generate samples of one prompt or several, as text or as token ids."""
        return await _generated(facade, body, request, "completion")

    @router.post(
        "/v1/chat/completions", response_model=None, responses=answered(forms.ChatForm, streams=True)
    )
    async def chat_completions(body: chat.ChatBody, request: Request) -> Response:
        """Generate samples that continue a conversation, by the model's chat template."""
        return await _generated(facade, body, request, "chat")

    async def world_size() -> forms.WorldSizeForm:
        """Return 1: trainers see one server, with any number of instances."""
        return forms.WorldSizeForm(world_size=1)

    for path in ("/get_world_size", "/get_world_size/"):
        router.get(path, include_in_schema=path == "/get_world_size")(world_size)

    @router.post("/generate/", response_model=None, responses=answered(forms.TrlForm))
    async def trl_generate(body: trl.TrlBody, request: Request) -> Response:
        """Generate samples for the client of `trl vllm-serve`."""
        requests = await facade.requests(request, body.requested)
        outputs = await facade.outputs(request, requests, "trl") if requests else []
        return await facade.answer(request, outputs, partial(trl.answer, body))

    return router


def _control(router: APIRouter, facade: Facade, updates: Updates) -> None:
    @router.post("/pause")
    async def pause(
        mode: Literal["abort", "wait", "keep"] = "abort", clear_cache: bool = True
    ) -> forms.PauseForm:
        """Let new requests wait; running ones are aborted, waited for, or continue. `clear_cache` has no effect."""
        aborted = await updates.pause(mode)
        return forms.PauseForm(status="paused", aborted_samples=aborted)

    @router.post("/resume")
    async def resume() -> forms.StatusForm:
        """End a pause."""
        updates.resume()
        return forms.StatusForm(status="resumed")

    @router.get("/is_paused")
    async def is_paused() -> forms.IsPausedForm:
        """Return whether new requests wait."""
        return forms.IsPausedForm(is_paused=facade.samples.paused)

    @router.post("/reset_prefix_cache", response_model=None, response_class=Response)
    async def reset_prefix_cache() -> Response:
        """Do nothing: KV of other weights is never used."""
        return Response(status_code=200)

    async def abort_requests(body: vllm.AbortRequestsBody) -> forms.AbortForm:
        """End requests; they are answered with the tokens that they have."""
        aborted = await facade.samples.abort(set(body.request_ids).__contains__)
        return forms.AbortForm(aborted_samples=aborted)

    for path in ("/abort_requests", "/inference/v1/abort_requests"):
        router.post(path)(abort_requests)

    @router.post("/update_weights")
    async def update_weights(body: vllm.UpdateBody, request: Request) -> forms.UpdateForm:
        """Publish the weights in a folder as the next version; running samples continue under it."""
        request.state.names = {"disk.path": "weight_dir"}
        outcome = await updates.from_folder(
            facade.run_id(request), body.weight_dir, t.InFlight.CONTINUE, lambda published: published + 1
        )
        return forms.UpdateForm(status="ok", message=outcome.message, weight_version=outcome.version)


async def _generated(
    facade: Facade, body: vllm.SamplingBody, request: Request, kind: answers.Kind
) -> Response:
    model = await facade.fleet.model()
    requests = await facade.requests(request, body.requested)
    request_id = body.request_id or uuid.uuid4().hex
    head = (f"{'chatcmpl' if kind == 'chat' else 'cmpl'}-{request_id}", int(time.time()), model.name)
    if body.stream:
        writer = answers.AnswerWriter(body, kind, head, facade.tokenizer)
        return EventResponse(facade, request, requests, "vllm", writer, request_id)
    outputs = await facade.outputs(request, requests, "vllm", request_id)
    return await facade.answer(
        request, outputs, partial(write_whole, answers.AnswerWriter, (body, kind, head))
    )


def tokens_routes(facade: Facade) -> APIRouter:
    """Return the routes for tokens."""
    router = body_router(facade, "vLLM and OpenAI")

    @router.post(
        "/inference/v1/generate", response_model=None, responses=answered(forms.TokensForm, streams=True)
    )
    async def generate(body: tokens.TokensBody, request: Request) -> Response:
        """Generate samples of one prompt, from token ids to token ids."""
        request_id, model = body.request_id or uuid.uuid4().hex, await facade.fleet.model()
        head = (int(time.time()), model.name)
        requests = await facade.requests(request, body.requested)
        if body.stream:
            writer = tokens.TokensWriter(body, request_id, head)
            return EventResponse(facade, request, requests, "vllm", writer, request_id)
        outputs = await facade.outputs(request, requests, "vllm", request_id)
        return await facade.answer(
            request, outputs, partial(write_whole, tokens.TokensWriter, (body, request_id, head))
        )

    @router.post("/tokenize", response_model=None, responses=answered(forms.TokenizeForm))
    async def tokenize(body: tokens.TokenizeBody) -> Response:
        """Return the token ids of a text."""
        return Response(body.answer, media_type="application/json")

    @router.post("/detokenize", response_model=None, responses=answered(forms.DetokenizeForm))
    async def detokenize(body: tokens.DetokenizeBody) -> Response:
        """Return the text of token ids, special tokens included."""
        return Response(body.answer, media_type="application/json")

    @router.post("/finish_session")
    async def finish_session(session_id: str) -> forms.StatusForm:
        """Do nothing: SkyRL frees a session's place in its router by this, and here no session holds one."""
        return forms.StatusForm(status="ok")

    return router
