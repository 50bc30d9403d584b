"""Sessions on real engines: five tool calls are one run over the same text, whatever dies between two of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import paceline
from examples.tinymath.calculator import compare
from paceline import Client, Group, RetryPolicy, Sample, SampleRequest, SamplingParams, Session, ToolUse
from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineRequest
from services.local import Platform
from tests.e2e.conftest import UNDER_TLS, VOCAB
from tests.support.oracle import Oracle

PATIENT = RetryPolicy(seconds=60, initial=0.1, maximum=1.0)
CALLS = (5, 6, 7)
TOOLS = ToolUse(call_token_ids=CALLS)
# Prompts of more than one block of KV.
PROMPTS = {
    f"p{number}": [3 + (number + place * place) % (VOCAB - 3) for place in range(200)] for number in range(3)
}
LIMIT, SEED, STEP = 700, 4, 2
SAMPLING = SamplingParams(max_tokens=LIMIT, ignore_eos=True)
# Scores of two forward passes in float32 that are closer than this are a tie.
TIE = 1e-4


@pytest.fixture
def client(platform: Platform) -> Iterator[Client]:
    with platform.client(retry=PATIENT) as client:
        yield client


@pytest.fixture(scope="module")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


def answer_to(turn: paceline.Turn) -> list[int]:
    """Return what the environment says; the last token would be a call, if the policy said it."""
    return [8 + (int(turn.token_ids[-1]) + place) % 50 for place in range(30)] + [CALLS[0]]


def five_calls(
    client: Client, name: str, prompts: dict[str, list[int]], between: Callable[[], object] = lambda: None
) -> list[Sample]:
    """Return sessions of five calls each; something happens when each waits for the answer to its third."""
    with client.run(name, seed=SEED) as run, run.sessions(STEP, TOOLS, SAMPLING) as sessions:
        begun = [session for each in prompts for session in sessions.begin(Group(each, prompts[each], 1))]
        for session in begun:
            for _ in range(2):
                session.answer(answer_to(_turn(session)))
        third = [_turn(session) for session in begun]
        between()
        for session, turn in zip(begun, third, strict=True):
            session.answer(answer_to(turn))
            session.answer(answer_to(_turn(session)))
            session.answer(answer_to(_turn(session)))
            # The sixth is not answered.
            _turn(session)
            session.end()
            assert session.generate().done
    samples = [session.sample for session in begun if session.sample is not None]
    assert len(samples) == len(prompts)
    assert all(len(sample.calls) == 6 for sample in samples)
    return samples


def _turn(session: Session) -> paceline.Turn:
    turn = session.generate()
    assert not turn.done
    assert turn.token_ids[-1] in CALLS
    return turn


def check(oracle: Oracle, sample: Sample) -> None:
    """Compare a session with one run over its text: a forward pass of transformers, and the noise of its seed."""
    request = EngineRequest("r", tuple(PROMPTS[sample.prompt_id]), (), Sampling(ignore_eos=True), sample.seed)
    text = sample.token_ids.tolist()
    judged = oracle.judge(request, text)
    mask = sample.policy_mask
    assert 6 <= mask.sum() < len(text)
    for position in mask.nonzero()[0]:
        assert judged.gap[position] < TIE, (position, text[position], judged.expected[position])
        assert sample.logprobs[position] == pytest.approx(judged.raw[position], abs=1e-4)
    assert not sample.logprobs[~mask].any()


def test_five_calls_equal_one_run_over_the_same_text_and_compute_nothing_twice(
    client: Client, oracle: Oracle
) -> None:
    (sample,) = five_calls(client, "whole", {"p0": PROMPTS["p0"]})
    check(oracle, sample)
    # Resumed by hand at each turn, it is the same, too.
    for begin, end in zip([0, *(span.end for span in sample.environment_spans)], sample.calls, strict=True):
        request = SampleRequest(
            "by-hand",
            "p0",
            PROMPTS["p0"],
            step=STEP,
            prefix_token_ids=sample.token_ids[:begin],
            sampling=SamplingParams(max_tokens=end, ignore_eos=True),
            run_seed=SEED,
        )
        *_, turn = client.generate(request)
        assert isinstance(turn, Sample)
        assert turn.token_ids.tolist() == sample.token_ids[begin:end].tolist()
    spans = sample.provenance.instance_spans
    assert len({span.instance_id for span in spans}) == 1
    found = [span.cached_context_tokens for span in spans]
    # All blocks that the turn before has filled; its last token was never computed.
    computed = [len(PROMPTS["p0"]) + span.end_token - 1 for span in spans]
    sizes = [
        size for size in (16, 32, 64, 128) if found[1:] == [each // size * size for each in computed[:-1]]
    ]
    assert sizes, (found, computed)


def test_an_instance_killed_between_two_calls_costs_a_prefill(
    platform: Platform, client: Client, oracle: Oracle
) -> None:
    samples = five_calls(client, "sessions-killed", PROMPTS, lambda: platform.kill("instance-0"))
    moved = 0
    for sample in samples:
        check(oracle, sample)
        spans = sample.provenance.instance_spans
        assert spans[-1].instance_id == "instance-1"
        if spans[2].instance_id == "instance-0":
            moved += 1
            assert spans[3].cached_context_tokens == 0
            assert spans[4].cached_context_tokens > 0
    assert moved
    platform.restart("instance-0")
    platform.wait_serving(2, time.monotonic() + 120)


def test_a_gateway_killed_between_two_calls_costs_nothing(
    platform: Platform, client: Client, oracle: Oracle
) -> None:
    for sample in five_calls(
        client, "sessions-failover", PROMPTS, lambda: platform.restart("gateway", kill=True)
    ):
        check(oracle, sample)


@pytest.mark.skipif(UNDER_TLS, reason="the example speaks to a platform without TLS")
def test_the_example_uses_its_calculator(platform: Platform, capsys: pytest.CaptureFixture[str]) -> None:
    rewards = compare(platform.gateway_address, count=2)
    assert all(0 <= reward <= 1 for reward in rewards)
    assert "calls in 8 sessions" in capsys.readouterr().out
