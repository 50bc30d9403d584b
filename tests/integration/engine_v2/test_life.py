"""A V2 engine over its life: moves to and from V1, aborts, weights, sleep, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from services.generation.engine.types import EngineOptions, EngineRequest, Verifier
from tests.integration.migration import test_engine as moves
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.engine_actor import EngineActor
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.oracle import Oracle
from tests.support.v2_slots import known_samples

pytestmark = pytest.mark.timeout(400)

SEATS = 2
TOKENS = 40
# Scores that are closer than this are a tie in float32.
TIE = 1e-4
MODES = (IN_TURN := "in turn", AHEAD := "ahead")
# Of what does not depend on whether a step is in flight.
only_ahead = pytest.mark.parametrize("engines", [AHEAD], indirect=True)
Engines = tuple[EngineActor, EngineActor]
Guessed = dict[str, list[tuple[int, int, list[int]]]]
"""Drafted and accepted tokens, and the emitted ones, by step and sample."""


def scored(
    engine: Any, count: int, drafts: dict[str, list[int]] | None = None
) -> dict[str, tuple[list[int], list[float]]]:
    """Tokens and log-probabilities by sample, as `moves.steps`; nothing is in flight afterwards."""
    found: dict[str, tuple[list[int], list[float]]] = dict(moves.steps(engine, count, drafts))  # type: ignore[arg-type]
    for step in engine.settle():
        tokens, logprobs = found.setdefault(step.sample_id, ([], []))
        tokens += step.token_ids
        logprobs += step.logprobs
    return found


def steps(engine: Any, count: int, drafts: dict[str, list[int]] | None = None) -> dict[str, list[int]]:
    """Tokens by sample of so many steps; nothing is in flight afterwards."""
    return {sample_id: tokens for sample_id, (tokens, _) in scored(engine, count, drafts).items()}


def update(engine: Any, folder: str, preempt: bool, *keep: str) -> None:
    from safetensors.torch import load_file

    weights = load_file(Path(folder) / "model.safetensors").items()
    engine.apply_weights(weights, preempt=preempt, keep=keep)


def keepable(engine: Any) -> list[str]:
    return list(engine.keepable())


def refusal(engine: Any, folder: str) -> str:
    """Why weights are not taken. It is told in words: to read an exception of the engine's a test imports vLLM."""
    try:
        update(engine, folder, True)
    except Exception as error:
        return str(error)
    return ""


def sleep(engine: Any) -> bool:
    engine.sleep()
    return bool(engine.asleep)


def in_flight(engine: Any) -> int:
    return int(engine.in_flight)


def request(name: str, response: list[int] | None = None, **fields: Any) -> EngineRequest:
    return moves.request(name, response, **({"max_tokens": TOKENS} | fields))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "qwen3"
    byte_tokenizer(folder, VOCAB_SIZE)
    return tiny_model(folder)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another policy of the same shape."""
    return tiny_model(tmp_path_factory.mktemp("model") / "other", seed=5)


@pytest.fixture(scope="module")
def oracles(model: Path, other: Path) -> tuple[Oracle, Oracle]:
    """What transformers makes of the two policies."""
    return Oracle(model), Oracle(other)


@pytest.fixture(scope="module")
def engines_of(model: Path) -> Iterator[Callable[[str], Engines]]:
    """Engines on V2, one for each mode, once it is asked for; and the one on V1 beside them."""
    common: dict[str, Any] = {
        "model": str(model),
        "dtype": "float32",
        "max_num_seqs": SEATS,
        "max_model_len": 256,
        "kv_cache_memory_bytes": 2 << 20,
        "block_size": moves.BLOCK,
    }
    with ExitStack() as stack:
        v1 = stack.enter_context(EngineActor(EngineOptions(**common), 1))

        @cache
        def of(mode: str) -> Engines:
            v2 = EngineOptions(**common, engine="v2", schedule_ahead=mode == AHEAD)
            return stack.enter_context(EngineActor(v2, 0)), v1

        yield of


@pytest.fixture(scope="module")
def address_of() -> Callable[[EngineActor], str]:
    """Where an engine takes KV, from the first time on that it is asked for."""
    return cache(lambda engine: engine.call(moves.listen))


@pytest.fixture(params=MODES)
def engines(request: pytest.FixtureRequest, engines_of: Callable[[str], Engines]) -> Engines:
    """An engine on V2, which schedules in turn or ahead, and one on V1; KV is sent to either."""
    return engines_of(request.param)


_serial = 0


@pytest.fixture
def name(engines: Engines) -> Iterator[str]:
    """An id that no engine has seen. Afterwards every block and every slot is free."""
    global _serial
    _serial += 1
    yield f"s{_serial}"
    for engine in engines:
        engine.call(steps, 0)
        found = engine.call(moves.space)
        assert found.free_blocks == found.total_blocks
        assert engine.call(moves.seats) == SEATS
        engine.call(moves.withdrawn_by_reset)
    assert engines[0].call(known_samples) == (0, 0)


@pytest.mark.parametrize(
    ("engines", "to_v2", "kind"),
    # Every pair of two of them.
    [
        (IN_TURN, True, "plain"),
        (IN_TURN, False, "penalties"),
        (AHEAD, True, "penalties"),
        (AHEAD, False, "plain"),
    ],
    indirect=["engines"],
)
def test_a_sample_moves_between_the_engines(
    engines: Engines, address_of: Callable[[EngineActor], str], name: str, to_v2: bool, kind: str
) -> None:
    fields = moves.SAMPLINGS[kind]
    engines[1].call(moves.add, request(f"{name}-stayed", **fields))
    stayed = engines[1].call(steps, 0)[f"{name}-stayed"]
    donor, receiver = engines[::-1] if to_v2 else engines
    # The donor's port is to be open as well.
    address_of(donor)
    way = (donor, receiver, address_of(receiver))
    receiver.call(moves.withdrawn_by_reset)
    donor.call(moves.add, request(name, **fields))
    sofar = donor.call(steps, 20)[name]
    exported, _ = moves.stage_one(way, name, sofar, **({"max_tokens": TOKENS} | fields))
    more = donor.call(steps, 4)[name]
    receiver.call(moves.scheduled)
    moves.stage_two(way, name, exported, more)
    sofar += more
    draft = stayed[len(sofar) : len(sofar) + 5]
    # The first step verifies drafts already: nothing is computed again.
    rest = receiver.call(steps, 0, {f"{name}'": draft})[f"{name}'"]
    assert receiver.call(moves.scheduled)[0] == {f"{name}'": 1 + len(draft)}
    assert [*sofar, *rest] == stayed


@only_ahead
def test_a_paused_sample_leaves_its_slot_to_others(engines: Engines, name: str) -> None:
    """It waits for the next seat, and goes on as if it had not been away."""
    engines[1].call(moves.add, request(f"{name}-stayed"))
    stayed = engines[1].call(steps, 0)[f"{name}-stayed"]
    engine = engines[0]
    engine.call(moves.add, request(name))
    tokens = engine.call(steps, 8)[name]
    engine.call(moves.migration, "pause", engine.call(moves.migration, "export", name))
    others = [request(f"{name}-{i}", max_tokens=8) for i in range(SEATS)]
    engine.call(moves.add, *others)
    assert engine.call(steps, 4).keys() == {each.sample_id for each in others}
    engine.call(moves.migration, "resume", name)
    found = engine.call(steps, 0)
    assert [*tokens, *found[name]] == stayed


@pytest.mark.parametrize(("engines", "place"), [(IN_TURN, 0), (AHEAD, 0), (AHEAD, 1)], indirect=["engines"])
def test_new_weights_drop_the_kv_of_a_sample_that_waits_with_it(
    engines: Engines, name: str, model: Path, place: int
) -> None:
    """Its seat was taken while it was paused; it computes its KV again."""
    engine = engines[place]
    engine.call(moves.add, request(f"{name}-stayed"))
    stayed = engine.call(steps, 0)[f"{name}-stayed"]
    engine.call(moves.add, request(name))
    tokens = engine.call(steps, 8)[name]
    engine.call(moves.migration, "pause", engine.call(moves.migration, "export", name))
    engine.call(moves.add, *[request(f"{name}-{i}", max_tokens=12) for i in range(SEATS)])
    engine.call(steps, 2)
    engine.call(moves.migration, "resume", name)
    engine.call(update, str(model), True)
    assert [*tokens, *engine.call(steps, 0)[name]] == stayed


@only_ahead
def test_a_grammar_is_followed(engines: Engines, name: str) -> None:
    """What a JSON schema allows next follows from tokens that only the device has."""
    fields = moves.SAMPLINGS["json"]
    v2, v1 = engines
    v1.call(moves.add, request(f"{name}-stayed", **fields))
    stayed = v1.call(steps, 0)[f"{name}-stayed"]
    v2.call(moves.add, request(name, **fields))
    tokens = v2.call(steps, 5)[name]
    draft = stayed[len(tokens) : len(tokens) + 6]
    draft[4] = (draft[4] + 1) % VOCAB_SIZE
    assert [*tokens, *v2.call(steps, 0, {name: draft})[name]] == stayed


def test_an_abort_frees_what_is_in_flight(engines: Engines, name: str) -> None:
    engine = engines[0]
    engine.call(moves.add, request(name), request(f"{name}-other", max_tokens=12))
    engine.call(moves.steps, 5)
    engine.call(moves.end, name)
    assert engine.call(steps, 0).keys() == {f"{name}-other"}


def test_new_weights_find_no_step_in_flight(engines: Engines, name: str, model: Path, other: Path) -> None:
    """Sampled tokens stay; the rest is what V1 samples behind them with the new weights."""
    v2, v1 = engines
    v2.call(moves.add, request(name))
    tokens = v2.call(moves.steps, 9)[name][0]
    if v2.call(in_flight):
        assert "in flight" in v2.call(refusal, str(other))
    tokens += v2.call(steps, 1)[name]
    for engine in engines:
        engine.call(update, str(other), True)
    rest = v2.call(steps, 0)[name]
    v1.call(moves.add, request(f"{name}-again", tokens))
    assert v1.call(steps, 0)[f"{name}-again"] == rest
    for engine in engines:
        engine.call(update, str(model), False)


@pytest.mark.parametrize(("engines", "place"), [(IN_TURN, 0), (AHEAD, 0), (AHEAD, 1)], indirect=["engines"])
def test_a_sample_keeps_its_kv_over_an_update(
    engines: Engines,
    address_of: Callable[[EngineActor], str],
    name: str,
    model: Path,
    other: Path,
    oracles: tuple[Oracle, Oracle],
    place: int,
) -> None:
    """The same weights change nothing. Others continue with the KV of the first, and no other sample does."""
    engine, pure = engines[place], engines[1 - place]
    # Its steps are counted from here on.
    address_of(engine)
    engine.call(moves.add, request(f"{name}-stayed"))
    stayed = engine.call(steps, 0)[f"{name}-stayed"]
    engine.call(moves.add, request(name))
    tokens, logprobs = engine.call(scored, 9)[name]
    assert engine.call(keepable) == [name]
    engine.call(update, str(model), True, name)
    engine.call(moves.scheduled)
    draft = stayed[len(tokens) : len(tokens) + 5]
    draft[3] = (draft[3] + 1) % VOCAB_SIZE
    more, more_logprobs = engine.call(scored, 1, {name: draft})[name]
    # Nothing is computed again, and three drafts are accepted.
    assert engine.call(moves.scheduled)[0] == {name: 1 + len(draft)}
    assert len(more) >= 4
    assert [*tokens, *more] == stayed[: len(tokens) + len(more)]
    cut = len(tokens) + len(more)
    engine.call(update, str(other), True, name)
    # This one begins while the first still has its blocks.
    engine.call(moves.add, request(f"{name}-new"))
    found = engine.call(scored, 0)
    rest, rest_logprobs = found[name]
    response = [*tokens, *more, *rest]
    judged = oracles[1].judge_on_kv(oracles[0], request(name), response, cut)
    assert max(judged.gap) < TIE
    assert rest_logprobs == pytest.approx(judged.raw, abs=1e-4)
    before = oracles[0].judge(request(name), response[:cut])
    assert [*logprobs, *more_logprobs] == pytest.approx(before.raw, abs=1e-4)
    # An engine that never had the old weights' KV of these tokens.
    pure.call(update, str(other), False)
    pure.call(moves.add, request(f"{name}-pure"), request(f"{name}-resumed", response[:cut]))
    wanted = pure.call(steps, 0)
    assert found[f"{name}-new"][0] == wanted[f"{name}-pure"]
    assert rest != wanted[f"{name}-resumed"], "its KV was computed again"
    # Its blocks are free now, and found by nobody.
    engine.call(moves.add, request(f"{name}-again", response[:cut]))
    assert engine.call(steps, 0)[f"{name}-again"] == wanted[f"{name}-resumed"]
    for each in engines:
        each.call(update, str(model), False)


@only_ahead
def test_kept_kv_moves_and_goes_with_the_next_update(
    engines: Engines, address_of: Callable[[EngineActor], str], name: str, model: Path, other: Path
) -> None:
    donor, receiver = engines
    twin = f"{name}-twin"
    address_of(donor)
    way = (donor, receiver, address_of(receiver))
    donor.call(moves.add, request(name), request(twin))
    tokens = donor.call(steps, 9)[name]
    donor.call(update, str(other), True, name, twin)
    tokens += donor.call(steps, 4)[name]
    receiver.call(update, str(other), False)
    # Its prefix cache has the prompt, as the new weights compute it.
    receiver.call(moves.add, request(f"{name}-prompt", max_tokens=1))
    receiver.call(steps, 0)
    exported, reserved = moves.stage_one(way, name, tokens, max_tokens=TOKENS, mixed_kv=True)
    assert reserved.shared_blocks == 0
    receiver.call(moves.scheduled)
    moves.stage_two(way, name, exported, [])
    moved = receiver.call(steps, 2)[f"{name}'"]
    assert receiver.call(moves.scheduled)[0] == {f"{name}'": 1}
    # A sample beside it finds the prompt that was there, and none of its KV.
    beside = request(f"{name}-beside", tokens)
    receiver.call(moves.add, beside)
    found = receiver.call(steps, 0)
    moved += found[f"{name}'"]
    receiver.call(moves.withdrawn_by_reset)
    receiver.call(moves.add, replace(beside, sample_id=f"{name}-alone"))
    alone = receiver.call(steps, 0)[f"{name}-alone"]
    assert found[f"{name}-beside"] == alone
    stayed = donor.call(steps, 4)[twin]
    assert stayed == moved[: len(stayed)]
    assert moved != alone[: len(moved)]
    # An update that keeps none lets the twin compute its KV again.
    donor.call(update, str(other), True)
    receiver.call(moves.add, request(f"{name}-resumed", [*tokens, *stayed]))
    assert donor.call(steps, 0)[twin] == receiver.call(steps, 0)[f"{name}-resumed"]
    for each in engines:
        each.call(update, str(model), False)


@only_ahead
def test_an_engine_sleeps_and_the_next_sample_wakes_it(engines: Engines, name: str) -> None:
    for engine in engines:
        assert engine.call(sleep)
        engine.call(moves.add, request(f"{name}-{engine is engines[0]}", max_tokens=6))
    found = [list(engine.call(steps, 0).values()) for engine in engines]
    assert found[0] == found[1]


def guessed(engine: Any, guesses: dict[str, list[int]], counts: dict[str, list[int]]) -> Guessed:
    """Steps to the end of all samples, which verify the tokens that are guessed for the places that they are at.

    `counts` are the drafts that each verifies in its steps, in order; for one that has none they are many or few.
    """
    found: Guessed = {name: [] for name in guesses}
    while engine.has_work:
        drafts = {}
        for i, state in enumerate(engine.decoding()):
            name, here = state.sample_id, len(state.response)
            own = counts.get(name)
            wanted = len(found[name]) * 5 % 12 + i if own is None else own[len(found[name])]
            drafts[name] = guesses[name][here : here + min(wanted, state.room)]
        engine.put_drafts({name: tokens for name, tokens in drafts.items() if tokens})
        for step in engine.step():
            found[step.sample_id].append((step.drafted, step.accepted, step.token_ids))
    return found


def test_drafts_that_are_verified_by_rejection_are_accepted_as_on_v1(engines: Engines, name: str) -> None:
    """Tokens depend on which places had drafts, so V1 verifies as many a step as V2 has."""
    # Of so few tokens that a guess is probable; the one behind them never is.
    few: dict[str, Any] = {"allowed_token_ids": (5, 6, 7)}
    asked = [request(f"{name}-plain", **few), request(f"{name}-all", **few | moves.SAMPLINGS["penalties"])]
    engines[1].call(moves.add, *asked)
    guesses = engines[1].call(steps, 0)
    for tokens in guesses.values():
        tokens[4::9] = [(token + 1) % VOCAB_SIZE for token in tokens[4::9]]
    rejecting = [replace(each, verifier=Verifier.REJECTION) for each in asked]
    engines[0].call(moves.add, *rejecting)
    found = engines[0].call(guessed, guesses, {})
    counts = {key: [drafted for drafted, _, _ in each] for key, each in found.items()}
    assert all(sum(each) > 20 for each in counts.values())
    engines[1].call(moves.add, *rejecting)
    assert engines[1].call(guessed, guesses, counts) == found
    assert sum(accepted for each in found.values() for _, accepted, _ in each) > 10


@pytest.mark.parametrize(("engines", "paused"), [(IN_TURN, True), (AHEAD, False)], indirect=["engines"])
def test_a_cached_rollout_is_followed_as_on_v1(engines: Engines, name: str, paused: bool) -> None:
    """Also by a sample that gives its slot away in between."""
    v2, v1 = engines
    v1.call(moves.add, replace(request(f"{name}-then"), seed=8))
    cached = v1.call(moves.steps, 0)[f"{name}-then"]
    lenient = replace(
        request(name),
        verifier=Verifier.LENIENT,
        cached=tuple(cached[0]),
        cached_logprobs=tuple(each + 0.05 for each in cached[1]),
    )
    v1.call(moves.add, replace(lenient, sample_id=f"{name}-stayed"))
    stayed = v1.call(steps, 0)[f"{name}-stayed"]
    same = [ours == theirs for ours, theirs in zip(stayed, cached[0], strict=True)]
    assert 6 < same.index(False) < TOKENS - 6
    v2.call(moves.add, lenient)
    tokens = v2.call(steps, 3, None)[name]
    if paused:
        v2.call(moves.migration, "pause", v2.call(moves.migration, "export", name))
        v2.call(moves.add, request(f"{name}-other", max_tokens=4))
        v2.call(steps, 0)
        v2.call(moves.migration, "resume", name)
    draft = cached[0][len(tokens) : len(tokens) + 8]
    assert [*tokens, *v2.call(steps, 0, None if paused else {name: draft})[name]] == stayed
