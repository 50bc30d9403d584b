"""What the integration with verl decides by itself: settings, sampling parameters, what a failed push leaves."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import InFlight, LogprobsMode, SamplingParams, Tls
from paceline.integrations.verl import FleetSettings, UnsupportedTrainerError
from paceline.integrations.verl.requests import RolloutDefaults, wants_logprobs
from paceline.integrations.verl.settings import push
from paceline.transport.channel import TlsFileError


def rollout(**changed: Any) -> RolloutDefaults:
    config = {
        "prompt_length": 10,
        "response_length": 20,
        "max_model_len": None,
        "ignore_eos": False,
        "repetition_penalty": 1.0,
        "logprobs_mode": "processed_logprobs",
    }
    return RolloutDefaults.read(SimpleNamespace(**config | changed))


def test_sampling_parameters_are_those_of_verl() -> None:
    given = {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "logprobs": True, "stop_token_ids": [5]}
    found = rollout(ignore_eos=True).sampling(given, prompt_tokens=4)
    assert found == SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=0,
        repetition_penalty=1.0,
        max_tokens=20,
        stop_token_ids=(5,),
        ignore_eos=True,
        logprobs_mode=LogprobsMode.PROCESSED,
    )


@pytest.mark.parametrize(
    ("given", "prompt", "most", "tokens"),
    [
        ({}, 4, None, 20),
        ({}, 25, None, 5),
        ({"max_tokens": 50}, 4, None, 50),
        ({"max_new_tokens": 7}, 4, None, 7),
        ({"max_tokens": 50}, 4, 30, 26),
        ({"max_tokens": 0}, 4, None, 1),
    ],
)
def test_responses_end_where_verl_ends_them(given: Any, prompt: int, most: int | None, tokens: int) -> None:
    assert rollout(max_model_len=most).sampling(given, prompt).max_tokens == tokens


@pytest.mark.parametrize("given", ["ab", ["ab"]])
def test_a_stop_string_may_stand_alone(given: Any) -> None:
    assert rollout().sampling({"stop": given}, 4).stop == ("ab",)


def test_sampling_parameters_that_are_not_supported_are_named() -> None:
    with pytest.raises(UnsupportedTrainerError, match="best_of, prompt_logprobs"):
        rollout().sampling({"prompt_logprobs": 1, "best_of": 2, "seed": None}, 4)
    with pytest.raises(UnsupportedTrainerError, match="max_model_len is 4"):
        rollout(max_model_len=4).sampling({}, 4)
    with pytest.raises(UnsupportedTrainerError, match="logprobs_mode=raw_logits"):
        rollout(logprobs_mode="raw_logits")


def test_log_probabilities_are_asked_for_by_a_flag_or_a_number() -> None:
    assert [wants_logprobs({"logprobs": value}) for value in (True, 0, False, None)] == [
        True,
        True,
        False,
        False,
    ]
    assert not wants_logprobs({})


def test_settings_are_read() -> None:
    found = FleetSettings.read({"address": ["a:1", "b:2"], "in_flight": "abort", "ca_file": "/ca"}, "here")
    assert found == FleetSettings(address=("a:1", "b:2"), in_flight=InFlight.ABORT, ca_file=Path("/ca"))
    assert found.name == "a:1;b:2"
    assert found.hints
    assert not FleetSettings.read({"address": "a:1", "hints": False}, "here").hints


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "here.address is not set"),
        ({"address": "a:1", "adress": 1}, "here has adress"),
        ({"address": "a:1", "in_flight": "drop"}, "here.in_flight"),
        ({"address": "a:1", "hints": "yes"}, "here.hints is 'yes'"),
        ({"address": "a:1", "insecure": 1}, "here.insecure is 1"),
        ({"address": "a:1", "weights_root": "/w"}, "weights_root and weights_model"),
    ],
)
def test_wrong_settings_are_named(given: Any, message: str) -> None:
    with pytest.raises(UnsupportedTrainerError, match=message):
        FleetSettings.read(given, "here")


@pytest.mark.parametrize("field", ["ca_file", "cert_file", "key_file", "server_name"])
def test_each_field_of_tls_turns_it_on(field: str) -> None:
    assert FleetSettings.read({"address": "a:1"}, "here")._tls() is None
    value = "name" if field == "server_name" else Path("name")
    assert FleetSettings.read({"address": "a:1", field: "name"}, "here")._tls() == Tls(**{field: value})  # type: ignore[arg-type]


def test_a_key_without_its_certificate_is_refused(tmp_path: Path) -> None:
    key = tmp_path / "key.pem"
    key.touch()
    with pytest.raises(TlsFileError, match="key_file is given without cert_file"):
        FleetSettings.read({"address": "a:1", "key_file": key}, "here").client()


class RefusedPush:
    """Settings of a fleet that refuses weights after the first tensor."""

    in_flight = InFlight.REFUSE

    def client(self) -> Any:
        return nullcontext()

    def run(self, client: Any) -> Any:
        return self

    def push_weights(self, weights: Any, *, in_flight: InFlight) -> None:
        next(weights)
        raise OSError("no gateway")


def test_tensors_are_read_to_their_end_also_when_a_push_fails() -> None:
    gathered = []

    def weights() -> Iterator[tuple[str, int]]:
        for number in range(3):
            gathered.append(number)
            yield f"t{number}", number

    with pytest.raises(OSError, match="no gateway"):
        push(weights(), RefusedPush())  # type: ignore[arg-type]
    assert gathered == [0, 1, 2]


def test_importing_it_imports_neither_verl_nor_what_it_needs() -> None:
    code = (
        "import paceline.integrations.verl.requests, sys; print({'verl', 'ray', 'torch'} & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert found.strip() == "set()"
