"""Routes of SGLang's native server."""

from __future__ import annotations

import uuid
from functools import partial
from importlib import metadata

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from paceline import types as t
from paceline.errors import Violation
from services.contracts.errors import InvalidArgument, Unimplemented
from services.facade.access import ABSENT
from services.facade.dialects import forms, sglang
from services.facade.dialects.forms import answered
from services.facade.gateway import Updates
from services.facade.serving import EventResponse, Facade, body_router
from services.facade.work.jobs import write_whole

_MODES = ("abort", "retract", "in_place")


def sglang_routes(facade: Facade, updates: Updates) -> APIRouter:
    """Return the routes of the dialect."""
    router = body_router(facade, "SGLang")
    _generation(router, facade)
    _control(router, facade, updates)
    _weights(router, facade, updates)
    _information(router, facade)
    return router


def _generation(router: APIRouter, facade: Facade) -> None:
    @router.post(
        "/generate",
        response_model=None,
        responses=answered(forms.SglangForm | list[forms.SglangForm], streams=True),
    )
    async def generate(body: sglang.GenerateBody, request: Request) -> Response:
        """Generate samples of one prompt or several; an aborted request is answered with the tokens that it has."""
        requests = await facade.requests(request, body.requested)
        request_id = body.rid or uuid.uuid4().hex
        if body.stream:
            writer = sglang.SglangWriter(body, request_id, None, facade.tokenizer)
            return EventResponse(facade, request, requests, "sglang", writer, request_id)
        outputs = await facade.outputs(request, requests, "sglang", request_id)
        unknown = any(not output.version_spans for output in outputs)
        version = await facade.fleet.policy_version() if unknown else 0
        write = partial(write_whole, sglang.SglangWriter, (body, request_id, version))
        return await facade.answer(request, outputs, write)

    @router.post("/abort_request")
    async def abort_request(body: sglang.AbortRequestBody) -> forms.SglangAbortForm:
        """End the requests whose names begin with `rid`, or all of this facade."""
        if not body.rid and not body.abort_all:
            raise InvalidArgument([Violation("rid", "is empty; name a request, or set abort_all")])
        aborted = await facade.samples.abort(lambda own: body.abort_all or own.startswith(body.rid))
        return forms.SglangAbortForm(success=True, aborted_samples=aborted)


def _control(router: APIRouter, facade: Facade, updates: Updates) -> None:
    @router.post("/pause_generation")
    async def pause_generation(body: sglang.PauseBody | None = None) -> forms.SglangControlForm:
        """Let new requests wait until /continue_generation, and end or keep running ones, by `mode`."""
        mode = "abort" if body is None else body.mode
        if mode not in _MODES:
            raise InvalidArgument(
                [Violation("mode", f"{mode!r} is not known; must be one of {', '.join(_MODES)}")]
            )
        aborted = await updates.pause(mode)
        return forms.SglangControlForm(
            success=True, message=f"new requests wait; {aborted} samples were ended"
        )

    @router.post("/continue_generation")
    async def continue_generation() -> forms.SglangControlForm:
        """End a pause."""
        updates.resume()
        return forms.SglangControlForm(success=True, message="requests continue")

    async def flush_cache() -> Response:
        """Answer 200 if no request is running. Nothing is flushed: KV of other weights is never used."""
        if running := facade.samples.running:
            return PlainTextResponse(f"{running} samples are running.\n", status_code=400)
        return PlainTextResponse("Cache flushed.\n")

    router.get("/flush_cache", response_model=None, response_class=PlainTextResponse)(flush_cache)
    router.post("/flush_cache", response_model=None, include_in_schema=False)(flush_cache)


def _weights(router: APIRouter, facade: Facade, updates: Updates) -> None:
    @router.post("/update_weights_from_disk")
    async def update_weights_from_disk(
        body: sglang.UpdateFromDiskBody, request: Request
    ) -> forms.SglangUpdateForm:
        """Publish the weights in a folder as the next version."""
        request.state.names = {"disk.path": "model_path"}
        in_flight = t.InFlight.ABORT if body.abort_all_requests else t.InFlight.CONTINUE
        outcome = await updates.from_folder(
            facade.run_id(request),
            body.model_path,
            in_flight,
            lambda published: sglang.requested_version(body.weight_version, published),
        )
        return forms.SglangUpdateForm(
            success=True,
            message=outcome.message,
            weight_version=str(outcome.version),
            num_paused_requests=facade.samples.samples - facade.samples.running,
        )

    async def absent(request: Request) -> None:
        path = request.url.path
        raise Unimplemented(path, f"{path} is not there: push weights by a folder, see docs/http.md")

    for path in ABSENT:
        router.post(path, include_in_schema=False)(absent)


def _information(router: APIRouter, facade: Facade) -> None:
    async def server_info(request: Request) -> forms.SglangServerForm:
        """Return the data that trainers check. They see one server, with any number of instances."""
        if "config_format" in request.query_params:
            raise Unimplemented("vllm_config", "this is not vLLM: there is no configuration of one")
        model, version = await facade.fleet.model(), await facade.fleet.policy_version()
        return forms.SglangServerForm(
            model_path=model.name,
            served_model_name=model.name,
            tp_size=1,
            pp_size=1,
            dp_size=1,
            enable_memory_saver=False,
            context_length=model.max_model_len,
            weight_version=str(version),
            version=f"paceline {metadata.version('paceline')}",
        )

    async def model_info() -> forms.SglangModelForm:
        """Return the model and the version of its weights."""
        model, version = await facade.fleet.model(), await facade.fleet.policy_version()
        return forms.SglangModelForm(
            model_path=model.name,
            tokenizer_path=str(facade.config.model or ""),
            is_generation=True,
            weight_version=str(version),
        )

    for path in ("/get_server_info", "/server_info"):
        router.get(path, include_in_schema=path == "/get_server_info")(server_info)
    for path in ("/get_model_info", "/model_info"):
        router.get(path, include_in_schema=path == "/get_model_info")(model_info)

    @router.get("/get_weight_version")
    async def get_weight_version() -> forms.WeightVersionForm:
        """Return the published version of the weights."""
        return forms.WeightVersionForm(weight_version=str(await facade.fleet.policy_version()))

    @router.get("/v1/loads")
    async def loads() -> forms.LoadsForm:
        """Return the numbers of running samples of this facade, and of samples that wait for the end of a pause."""
        running, samples = facade.samples.running, facade.samples.samples
        load = forms.LoadForm(dp_rank=0, num_running_reqs=running, num_waiting_reqs=samples - running)
        return forms.LoadsForm(loads=[load])
