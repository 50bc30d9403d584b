"""Samples that leave an engine with their KV and come to it again under other names, in its own process.

For `EngineActor.call`: the whole way of a move, over a socket, with one engine in the place of two.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from services.generation.engine.types import EngineRequest
from services.generation.kv_transfer.block_store import UnsupportedCaches
from services.generation.kv_transfer.transfers import KvPart

_WAIT = 20.0
_TOKEN = b"t" * 32
_ports: list[str] = []


def refused_moves(engine: Any) -> str:
    """Open the port of an engine; return why its KV is not moved, "" if it is."""
    try:
        engine.migration.open_ports(1 << 16, 2)
    except UnsupportedCaches as error:
        return str(error)
    _ports.append(f"127.0.0.1:{engine.migration.call_ports('listen', '127.0.0.1', 0, None)[0]}")
    return ""


def moved(engine: Any, requests: Sequence[EngineRequest], at: int) -> dict[str, list[int]]:
    """Return the tokens of samples that are moved one after the other once each has `at` of them."""
    tokens: dict[str, list[int]] = {request.sample_id: [] for request in requests}
    for request in requests:
        engine.add(replace(request, sample_id=f"donor/{request.sample_id}"))
    while any(len(each) < at for each in tokens.values()):
        _step(engine, tokens)
    for request in requests:
        _move(engine, request, tokens[request.sample_id])
    while engine.has_work:
        _step(engine, tokens)
    engine.forget_kv()
    return tokens


def _step(engine: Any, tokens: dict[str, list[int]]) -> None:
    for step in engine.step():
        tokens[step.sample_id.partition("/")[2]] += step.token_ids


def _move(engine: Any, request: EngineRequest, sofar: list[int]) -> None:
    migration, left, entering = (
        engine.migration,
        f"donor/{request.sample_id}",
        f"receiver/{request.sample_id}",
    )
    paused = migration.pause(migration.export(left))
    asked = replace(request, sample_id=entering, prefix=tuple(sofar))
    reserved = migration.reserve(asked, len(request.prompt) + len(sofar) + 8)
    shared = reserved.shared_blocks * migration.space.block_size
    port = migration.own_port()
    migration.call_ports("expect", "m", _TOKEN, reserved.blocks, shared, _WAIT)
    part = KvPart(shared, paused.tokens - shared, paused.blocks[reserved.shared_blocks :])
    sent = port.send("m", _ports[-1:], _TOKEN, _WAIT, part).result(_WAIT)
    assert migration.call_ports("received", "m") == [(paused.tokens, sent.crc)]
    migration.call_ports("drop", "m")
    migration.enter(entering, [])
    engine.abort([left])
    migration.call_ports("end", "m")
