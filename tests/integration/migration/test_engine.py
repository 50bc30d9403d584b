"""What migration does to vLLM: a sample leaves and enters elsewhere with its KV; none of it is computed again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.contracts.sampling import Sampling
from services.generation.engine.experiments.trees.tree import forked
from services.generation.engine.types import EngineOptions, EngineRequest, Exported, KvSpace, Reserved
from services.generation.kv_transfer.reason import NotMoved, Reason
from services.generation.kv_transfer.transfers import KvPart
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.engine_actor import EngineActor
from tests.support.models import VOCAB_SIZE

BLOCK = 32
SEATS = 3
PROMPT = tuple(range(2, 72))
TOKEN = b"t" * 32
WAIT = 20.0


# -- in the engines' processes ----------------------------------------------------------------------------------

_state: dict[str, Any] = {}


def listen(engine: Any) -> str:
    migration = engine.migration
    migration.open_ports(1 << 16, 2)
    (port,) = migration.call_ports("listen", "127.0.0.1", 0, None)
    schedule = type(engine._scheduler).schedule
    _state["scheduled"] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        output = schedule(engine._scheduler, *args, **kwargs)
        _state["scheduled"].append(dict(output.num_scheduled_tokens))
        return output

    engine._scheduler.schedule = counted
    return f"127.0.0.1:{port}"


def space(engine: Any) -> KvSpace:
    found: KvSpace = engine.migration.space
    return found


def seats(engine: Any) -> int:
    return int(engine.migration.free_capacity)


def add(engine: Any, *requests: EngineRequest) -> None:
    for request in requests:
        engine.add(request)


def steps(
    engine: Any,
    count: int,
    drafts: dict[str, list[int]] | None = None,
    parents: dict[str, list[int]] | None = None,
) -> dict[str, tuple[Any, ...]]:
    """(tokens, log-probabilities) by sample of so many steps, the first of which verifies drafts; 0: to the end."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    if drafts:
        states = {state.sample_id for state in engine.decoding()}
        assert states >= drafts.keys()
        engine.put_drafts(forked(drafts, parents or {}))
    while engine.has_work:
        for step in engine.step():
            tokens, logprobs = found.setdefault(step.sample_id, ([], []))
            tokens += step.token_ids
            logprobs += step.logprobs
        count -= 1
        if count == 0:
            break
    return found


def scheduled(engine: Any) -> list[dict[str, int]]:
    """What each step since the last call gave to which sample."""
    found: list[dict[str, int]] = _state["scheduled"]
    _state["scheduled"] = []
    return found


def migration(engine: Any, method: str, *args: Any) -> Any:
    return getattr(engine.migration, method)(*args)


def send(engine: Any, address: str, part: KvPart) -> Any:
    return engine.migration.own_port().send("m", [address], TOKEN, WAIT, part).result(WAIT)


def port(engine: Any, method: str, *args: Any) -> Any:
    (answer,) = engine.migration.call_ports(method, *args)
    return answer


def withdrawn_by_reset(engine: Any) -> list[str]:
    """Drop all KV; the reservations that went with it."""
    gone: list[str] = []
    engine.migration.on_withdrawn = gone.append
    engine.forget_kv()
    return gone


def end(engine: Any, *sample_ids: str) -> None:
    engine.abort(sample_ids)


# -- the tests --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[tuple[EngineActor, EngineActor, str]]:
    """Donor, receiver, and the receiver's address for KV."""
    options = EngineOptions(
        model=str(model),
        dtype="float32",
        max_num_seqs=SEATS,
        max_model_len=512,
        kv_cache_memory_bytes=4 << 20,
        block_size=BLOCK,
        trees=True,
    )
    with EngineActor(options, 0) as donor, EngineActor(options, 1) as receiver:
        donor.call(listen)
        yield donor, receiver, receiver.call(listen)


_serial = 0


@pytest.fixture
def name(engines: tuple[EngineActor, EngineActor, str]) -> Iterator[str]:
    """An id that no engine has seen. Afterwards every block is free."""
    global _serial
    _serial += 1
    yield f"s{_serial}"
    for engine in engines[:2]:
        engine.call(steps, 0)
        found = engine.call(space)
        assert found.free_blocks == found.total_blocks
        assert engine.call(seats) == SEATS
        engine.call(withdrawn_by_reset)
        engine.call(scheduled)


def request(name: str, response: list[int] | None = None, **fields: Any) -> EngineRequest:
    sampling = Sampling(**({"max_tokens": 150, "ignore_eos": True} | fields))
    return EngineRequest(name, PROMPT, tuple(response or ()), sampling, 77)


def stage_one(
    engines: tuple[EngineActor, EngineActor, str], name: str, response: list[int], **fields: Any
) -> tuple[Exported, Reserved]:
    """Reserve, and send the whole blocks; with `mixed_kv` as those of a sample that kept its KV over an update."""
    donor, receiver, address = engines
    exported = donor.call(migration, "export", name)
    mixed_kv = fields.pop("mixed_kv", False)
    asked = replace(request(f"{name}'", response, **fields), mixed_kv=mixed_kv)
    reserved = receiver.call(migration, "reserve", asked, len(PROMPT) + len(response) + 40)
    receiver.call(port, "expect", "m", TOKEN, reserved.blocks, reserved.shared_blocks * BLOCK, WAIT)
    shared, whole = reserved.shared_blocks, exported.tokens // BLOCK
    part = KvPart(shared * BLOCK, (whole - shared) * BLOCK, exported.blocks[shared:whole])
    donor.call(send, address, part)
    return exported, reserved


def stage_two(
    engines: tuple[EngineActor, EngineActor, str], name: str, exported: Exported, new: list[int]
) -> None:
    """Pause, send the rest, enter, and leave."""
    donor, receiver, address = engines
    paused = donor.call(migration, "pause", exported)
    begin = exported.tokens // BLOCK
    part = KvPart(begin * BLOCK, paused.tokens - begin * BLOCK, paused.blocks[begin:])
    sent = donor.call(send, address, part)
    assert receiver.call(port, "received", "m") == (paused.tokens, sent.crc)
    receiver.call(port, "drop", "m")
    receiver.call(migration, "enter", f"{name}'", new)
    donor.call(end, name)
    donor.call(port, "end", "m")


SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "masks": {"top_k": 40, "top_p": 0.9, "min_p": 0.01, "temperature": 0.8},
    "penalties": {"repetition_penalty": 1.2, "presence_penalty": 0.6, "frequency_penalty": 0.3},
    "min tokens": {"min_tokens": 120, "ignore_eos": False, "stop_token_ids": tuple(range(1, 400))},
    "processed": {"processed_logprobs": True, "temperature": 0.7, "top_k": 50},
    "allowed": {"allowed_token_ids": tuple(range(2, 512, 3))},
    # An array that is longer than a response.
    "json": {
        "ignore_eos": False,
        "json_schema": '{"type": "array", "items": {"type": "integer"}, "minItems": 150}',
    },
}


@pytest.mark.parametrize("kind", SAMPLINGS)
def test_nothing_is_computed_again_and_nothing_changes(
    engines: tuple[EngineActor, EngineActor, str], name: str, kind: str
) -> None:
    donor, receiver, _ = engines
    fields = SAMPLINGS[kind]
    receiver.call(add, request(f"{name}-stayed", **fields))
    stayed, stayed_logprobs = receiver.call(steps, 0)[f"{name}-stayed"]
    receiver.call(withdrawn_by_reset)
    donor.call(add, request(name, **fields))
    tokens, logprobs = donor.call(steps, 45)[name]
    exported, _ = stage_one(engines, name, tokens, **fields)
    more, more_logprobs = donor.call(steps, 9)[name]
    receiver.call(scheduled)
    stage_two(engines, name, exported, more)
    # The first step verifies drafts already.
    sofar = [*tokens, *more]
    draft = stayed[len(sofar) : len(sofar) + 5]
    first, first_logprobs = receiver.call(steps, 1, {f"{name}'": draft})[f"{name}'"]
    assert receiver.call(scheduled)[-1] == {f"{name}'": 1 + len(draft)}
    assert len(first) == 1 + len(draft)
    rest, rest_logprobs = receiver.call(steps, 0)[f"{name}'"]
    assert [*sofar, *first, *rest] == stayed
    assert [*logprobs, *more_logprobs, *first_logprobs, *rest_logprobs] == pytest.approx(
        stayed_logprobs, abs=1e-5
    )


def test_the_kv_of_an_accepted_branch_moves(engines: tuple[EngineActor, EngineActor, str], name: str) -> None:
    """In the whole blocks that are sent first, and in those that follow."""
    donor, receiver, _ = engines
    receiver.call(add, request(f"{name}-stayed"))
    stayed, stayed_logprobs = receiver.call(steps, 0)[f"{name}-stayed"]
    receiver.call(withdrawn_by_reset)
    donor.call(add, request(name))
    tokens, logprobs = donor.call(steps, 20)[name]

    def branch() -> None:
        """Accept eight tokens of a branch that stands behind two wrong ones."""
        right = stayed[len(tokens) : len(tokens) + 8]
        wrong = (right[0] + 1) % VOCAB_SIZE
        found = donor.call(steps, 1, {name: [wrong, wrong, *right]}, {name: [-1, 0, -1, *range(2, 9)]})[name]
        assert len(found[0]) == 9
        tokens.extend(found[0])
        logprobs.extend(found[1])

    branch()
    branch()
    exported, _ = stage_one(engines, name, list(tokens))
    before = len(tokens)
    branch()
    receiver.call(scheduled)
    stage_two(engines, name, exported, tokens[before:])
    rest, rest_logprobs = receiver.call(steps, 0)[f"{name}'"]
    # The first step there computes one token alone: the rest came.
    assert receiver.call(scheduled)[0] == {f"{name}'": 1}
    assert [*tokens, *rest] == stayed
    assert [*logprobs, *rest_logprobs] == pytest.approx(stayed_logprobs, abs=1e-5)


def test_a_stop_string_begins_before_a_move_and_ends_behind_it(
    engines: tuple[EngineActor, EngineActor, str], name: str, tmp_path: Path
) -> None:
    donor, receiver, _ = engines
    text = byte_tokenizer(tmp_path, VOCAB_SIZE)
    receiver.call(add, request(f"{name}-stayed"))
    stayed, _ = receiver.call(steps, 0)[f"{name}-stayed"]
    receiver.call(withdrawn_by_reset)
    # The sample moves after 54 tokens.
    stop = b"".join(text[token] for token in stayed[51:57])
    whole = b"".join(text[token] for token in stayed)
    assert whole.index(stop) == len(b"".join(text[token] for token in stayed[:51]))
    donor.call(add, request(name, stop=(stop.decode(),)))
    tokens, _ = donor.call(steps, 45)[name]
    exported, _ = stage_one(engines, name, tokens, stop=(stop.decode(),))
    more, _ = donor.call(steps, 9)[name]
    stage_two(engines, name, exported, more)
    rest, _ = receiver.call(steps, 1, {f"{name}'": stayed[54:64]})[f"{name}'"]
    assert [*tokens, *more, *rest] == stayed[:57]
    assert receiver.call(steps, 1) == {}


def test_a_prompt_that_the_receiver_knows_is_shared(
    engines: tuple[EngineActor, EngineActor, str], name: str
) -> None:
    donor, receiver, _ = engines
    receiver.call(add, request(f"{name}-other", max_tokens=100))
    receiver.call(steps, 3)
    before = receiver.call(space).free_blocks
    donor.call(add, request(name))
    tokens, _ = donor.call(steps, 20)[name]
    exported, reserved = stage_one(engines, name, tokens)
    assert reserved.shared_blocks == len(PROMPT) // BLOCK
    assert before - receiver.call(space).free_blocks == len(reserved.blocks) - reserved.shared_blocks
    stage_two(engines, name, exported, [])
    assert len(receiver.call(steps, 0)[f"{name}'"][0]) == 130


def test_a_paused_sample_that_goes_on_is_as_it_was(
    engines: tuple[EngineActor, EngineActor, str], name: str
) -> None:
    donor, receiver, _ = engines
    receiver.call(add, request(f"{name}-stayed"))
    stayed = receiver.call(steps, 0)[f"{name}-stayed"][0]
    donor.call(add, request(name), request(f"{name}-other"))
    tokens = donor.call(steps, 30)[name][0]
    exported = donor.call(migration, "export", name)
    donor.call(migration, "pause", exported)
    # Others go on without it.
    assert donor.call(steps, 5).keys() == {f"{name}-other"}
    with pytest.raises(NotMoved) as caught:
        donor.call(migration, "pause", exported)
    assert caught.value.reason is Reason.IN_TRANSIT
    donor.call(migration, "resume", name)
    donor.call(scheduled)
    tokens += donor.call(steps, 1)[name][0]
    assert donor.call(scheduled)[-1][name] == 1
    tokens += donor.call(steps, 0)[name][0]
    assert tokens == stayed


def test_a_paused_sample_whose_seat_is_taken_gets_the_next(
    engines: tuple[EngineActor, EngineActor, str], name: str
) -> None:
    donor = engines[0]
    donor.call(add, *[request(f"{name}{each}") for each in "abcd"])
    got = donor.call(steps, 30)
    assert len(got) == SEATS
    donor.call(migration, "pause", donor.call(migration, "export", f"{name}a"))
    assert f"{name}d" in donor.call(steps, 3)
    donor.call(migration, "resume", f"{name}a")
    assert f"{name}a" not in donor.call(steps, 3)
    donor.call(end, f"{name}b")
    donor.call(scheduled)
    again = donor.call(steps, 1)
    assert donor.call(scheduled)[-1][f"{name}a"] == 1
    assert len(got[f"{name}a"][0]) + len(again[f"{name}a"][0]) == 31


def test_an_aborted_paused_sample_leaves_nothing(
    engines: tuple[EngineActor, EngineActor, str], name: str
) -> None:
    donor = engines[0]
    donor.call(add, request(name))
    donor.call(steps, 10)
    donor.call(migration, "pause", donor.call(migration, "export", name))
    donor.call(end, name)
    donor.call(migration, "resume", name)


def test_a_waiting_or_starting_sample_stays(engines: tuple[EngineActor, EngineActor, str], name: str) -> None:
    donor = engines[0]
    donor.call(add, *[request(f"{name}{each}") for each in "abcd"])
    donor.call(steps, 2)
    with pytest.raises(NotMoved) as caught:
        donor.call(migration, "export", f"{name}d")
    assert caught.value.reason is Reason.NOT_DECODING
    with pytest.raises(NotMoved) as caught:
        donor.call(migration, "export", "unknown")
    assert caught.value.reason is Reason.UNKNOWN_SAMPLE
    donor.call(end, *[f"{name}{each}" for each in "abcd"])


def test_a_reservation_does_not_outlive_the_kv(
    engines: tuple[EngineActor, EngineActor, str], name: str
) -> None:
    receiver = engines[1]
    receiver.call(migration, "reserve", request(name, [5, 6, 7]), 200)
    assert receiver.call(seats) == SEATS - 1
    assert receiver.call(withdrawn_by_reset) == [name]
    with pytest.raises(NotMoved) as caught:
        receiver.call(migration, "enter", name, [])
    assert caught.value.reason is Reason.WITHDRAWN


def test_what_does_not_fit_is_refused_and_changes_nothing(
    engines: tuple[EngineActor, EngineActor, str], name: str
) -> None:
    receiver = engines[1]
    total = receiver.call(space)
    kept: list[Reserved] = []

    def until_full() -> None:
        while True:
            kept.append(receiver.call(migration, "reserve", request(f"{name}{len(kept)}", [5]), 500))

    with pytest.raises(NotMoved) as caught:
        until_full()
    assert caught.value.reason in (Reason.FULL, Reason.NO_KV)
    assert kept
    used = len({block for each in kept for block in each.blocks})
    assert receiver.call(space).free_blocks == total.free_blocks - used
    for each in kept:
        receiver.call(migration, "cancel", each.sample_id)
    assert receiver.call(space) == total
