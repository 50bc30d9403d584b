"""Stop strings and JSON schemas: the same tokens and the same end with any draft, batch and resumption."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest

from services.contracts.sampling import Sampling
from services.generation.engine.types import EngineRequest, Finish
from tests.integration.exactness.conftest import T1, Bench, engine, requests_of, run
from tests.support.byte_tokenizer import byte_tokenizer
from tests.support.draft_policies import Drafts
from tests.support.engine_host import Outcome
from tests.support.models import END_TOKEN, VOCAB_SIZE

pytestmark = pytest.mark.timeout(400)

ENDLESS = replace(T1, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class Spelled:
    """An engine whose tokens have text, samples without an end, and where they end by stop strings of their own."""

    bench: Bench
    text: list[bytes]
    whole: dict[str, list[int]]
    requests: tuple[EngineRequest, ...]
    ends: dict[str, int]

    def text_of(self, tokens: Sequence[int]) -> bytes:
        return b"".join(self.text[token] for token in tokens)

    def check(self, requests: Sequence[EngineRequest], drafts: Drafts, **how: object) -> None:
        """Run them: each has the tokens up to its end, and says what ended it."""
        found = run(self.bench, tuple(requests), drafts=drafts, **how)
        for request in requests:
            key, end = request.sample_id, self.ends[request.sample_id]
            assert found.tokens[key] == self.whole[key][len(request.prefix) : end], key
            assert found.finishes[key] is Finish.STOP
            assert found.stop_strings[key] == request.sampling.stop[0]


@pytest.fixture(scope="module")
def spelled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spelled]:
    folder = tmp_path_factory.mktemp("model")
    text = byte_tokenizer(folder / "qwen3", VOCAB_SIZE)
    for bench in engine(folder, "qwen3", {}):
        free = requests_of(VOCAB_SIZE, ENDLESS)
        whole = run(bench, free).tokens
        requests, ends = [], {}
        for request in free:
            tokens = whole[request.sample_id]
            # It begins and ends inside tokens, where these are long enough.
            part = b"".join(text[token] for token in tokens[20:23])[1:]
            for stop in (part[:-1], part):
                try:
                    stop_string = stop.decode()
                except UnicodeDecodeError:
                    continue
                if len(stop_string) > 1:
                    break
            else:
                continue
            ends[request.sample_id] = next(
                n for n in range(len(tokens) + 1) if stop in b"".join(text[token] for token in tokens[:n])
            )
            sampling = replace(ENDLESS, stop=(stop_string, "never in there at all"))
            requests.append(replace(request, sampling=sampling))
        assert len(requests) > 15
        yield Spelled(bench, text, whole, tuple(requests), ends)


@pytest.mark.parametrize("policy", ["none", "true", "varying", "adversarial"])
def test_the_sample_ends_with_the_token_that_completes_one(spelled: Spelled, policy: str) -> None:
    """The drafts go on past the end."""
    spelled.check(spelled.requests, Drafts(policy, truth=spelled.whole))


def test_it_does_not_matter_when_a_sample_comes(spelled: Spelled) -> None:
    late = tuple(2 * i for i in range(len(spelled.requests)))
    spelled.check(spelled.requests[::-1], Drafts("varying", truth=spelled.whole), arrivals=late)


@pytest.mark.parametrize("policy", ["none", "varying"])
def test_a_resumed_sample_knows_the_text_before(spelled: Spelled, policy: str) -> None:
    """Also where the stop string had begun when its instance was lost."""
    for left in (1, 2, 7):
        resumed = [
            replace(request, prefix=tuple(spelled.whole[request.sample_id][: end - left]))
            for request in spelled.requests
            if (end := spelled.ends[request.sample_id]) > left
        ]
        assert len(resumed) > 15
        spelled.check(resumed, Drafts(policy, truth=spelled.whole))


def test_a_stop_string_before_min_tokens_ends_nothing(spelled: Spelled) -> None:
    requests = tuple(
        replace(r, sampling=replace(r.sampling, min_tokens=spelled.ends[r.sample_id]))
        for r in spelled.requests
    )
    found = run(spelled.bench, requests, drafts=Drafts("true", truth=spelled.whole))
    for request in requests:
        tokens, end = found.tokens[request.sample_id], spelled.ends[request.sample_id]
        assert tokens == spelled.whole[request.sample_id][: len(tokens)]
        assert len(tokens) > end


def test_samples_without_stop_strings_go_on_beside_them(spelled: Spelled) -> None:
    free = tuple(replace(r, sample_id=f"free-{r.sample_id}", sampling=ENDLESS) for r in spelled.requests)
    found = run(spelled.bench, spelled.requests + free)
    for request in spelled.requests:
        key = request.sample_id
        assert found.tokens[f"free-{key}"] == spelled.whole[key]
        assert found.tokens[key] == spelled.whole[key][: spelled.ends[key]]


def test_a_stop_string_at_the_length_limit_is_the_reason(spelled: Spelled) -> None:
    requests = tuple(
        replace(r, sampling=replace(r.sampling, max_tokens=spelled.ends[r.sample_id]))
        for r in spelled.requests
    )
    spelled.check(requests, Drafts("true", truth=spelled.whole))


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {
            "answer": {"type": "integer", "minimum": -99, "maximum": 999},
            "kind": {"enum": ["sum", "product", "sumé"]},
            "sure": {"type": "boolean"},
        },
        "required": ["answer", "kind"],
        "additionalProperties": False,
    }
)


@dataclass(frozen=True, slots=True)
class Json:
    """Samples under a schema, and what plain decoding gives of them."""

    requests: tuple[EngineRequest, ...]
    plain: Outcome


@pytest.fixture(scope="module")
def json_of(spelled: Spelled) -> Json:
    """Samples of several ways of sampling."""
    ways = (
        Sampling(max_tokens=100, json_schema=SCHEMA),
        Sampling(max_tokens=100, json_schema=SCHEMA, temperature=0.0),
        Sampling(max_tokens=100, json_schema=SCHEMA, top_p=0.9, temperature=0.7, processed_logprobs=True),
        Sampling(max_tokens=12, json_schema=SCHEMA, repetition_penalty=1.2),
    )
    requests = tuple(
        replace(request, sampling=ways[i % 4])
        for i, request in enumerate(requests_of(VOCAB_SIZE, T1, seed=9))
    )
    return Json(requests, run(spelled.bench, requests))


def test_the_response_is_json_of_the_schema(spelled: Spelled, json_of: Json) -> None:
    ended = 0
    for request in json_of.requests:
        tokens, finish = json_of.plain.tokens[request.sample_id], json_of.plain.finishes[request.sample_id]
        if finish is Finish.LENGTH:
            continue
        ended += 1
        assert tokens[-1] == END_TOKEN
        found = json.loads(spelled.text_of(tokens[:-1]))
        assert {"answer", "kind"} <= found.keys() <= {"answer", "kind", "sure"}
        assert -99 <= found["answer"] <= 999
        assert found["kind"] in ("sum", "product", "sumé")
    assert ended > 8


def test_each_token_is_the_masked_rows_own(spelled: Spelled, json_of: Json) -> None:
    """The oracle masks each row anew, from the whole response before it."""
    spelled.bench.check(json_of.requests[:8], json_of.plain)


@pytest.mark.parametrize("policy", ["true", "varying", "adversarial", "random"])
def test_no_draft_changes_json(spelled: Spelled, json_of: Json, policy: str) -> None:
    found = run(spelled.bench, json_of.requests, drafts=Drafts(policy, truth=json_of.plain.tokens))
    assert found.tokens == json_of.plain.tokens
    assert found.finishes == json_of.plain.finishes
    assert found.drafted > 100


@pytest.mark.parametrize("policy", ["none", "varying"])
def test_json_goes_on_where_it_was(spelled: Spelled, json_of: Json, policy: str) -> None:
    """Resumed samples, beside others that follow no schema."""
    whole = json_of.plain.tokens
    resumed = tuple(
        replace(request, prefix=tuple(whole[request.sample_id][: 1 + i % 7]))
        for i, request in enumerate(json_of.requests)
        if len(whole[request.sample_id]) > 1 + i % 7
    )
    assert len(resumed) > 15
    free = tuple(replace(r, sample_id=f"free-{r.sample_id}", sampling=ENDLESS) for r in spelled.requests)
    truth = whole | {f"free-{key}": tokens for key, tokens in spelled.whole.items()}
    found = run(spelled.bench, resumed + free, drafts=Drafts(policy, truth=truth))
    for request in resumed:
        assert found.tokens[request.sample_id] == whole[request.sample_id][len(request.prefix) :]
    for request in free:
        assert found.tokens[request.sample_id] == truth[request.sample_id]


def test_a_prefix_that_the_schema_forbids_ends_as_an_error_of_its_own(
    spelled: Spelled, json_of: Json
) -> None:
    """The instance refuses it before; an engine that gets it all the same harms nobody else."""
    wrong = replace(json_of.requests[0], sample_id="wrong", prefix=(5, 6))
    found = run(spelled.bench, (wrong, *json_of.requests))
    assert found.finishes["wrong"] is Finish.ERROR
    assert {key: found.tokens[key] for key in json_of.plain.tokens} == json_of.plain.tokens
