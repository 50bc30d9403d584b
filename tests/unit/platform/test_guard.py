"""Tokens, their scopes and their rates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import structlog
import yaml
from google.rpc import error_details_pb2

from paceline.cli.app import run
from paceline.internal.v1 import bubble_pb2, draft_pb2, generation_pb2, weight_peer_pb2
from paceline.tokens import TokenScope, hash_token, new_token
from paceline.v1 import fleet_pb2, rollout_pb2, weight_pb2, weight_stream_pb2
from services.contracts.errors import PermissionDenied, ResourceExhausted, ServiceError, Unauthenticated
from services.platform.config import ConfigError, ServiceConfig
from services.platform.security.caller import TokenHolder, act_for, current_caller
from services.platform.security.certificates import Unreadable
from services.platform.security.guard import Grant, Guard, guard_of, read_grants, scopes_for

SUBMIT = "/paceline.v1.RolloutService/SubmitRollouts"
DRAIN = "/paceline.v1.FleetService/Drain"
ENTRY = {"name": "a", "sha256": "0" * 64, "scopes": ["rollouts"]}
LIST = "/paceline.v1.FleetService/ListInstances"
WORK = "/paceline.internal.v1.GenerationService/Work"


@pytest.fixture(autouse=True)
def nobody() -> Iterator[None]:
    """Whoever is admitted here calls nothing in the tests that follow in this process."""
    yield
    act_for(None)


def grant(token: str, *scopes: TokenScope, **limits: Any) -> Grant:
    return Grant(name=f"of-{token}", sha256=hash_token(token), scopes=frozenset(scopes), **limits)


def guard(*grants: Grant, own: str | None = None, now: Iterator[float] | None = None) -> Guard:
    return Guard(lambda: own, lambda: grants, (lambda: next(now)) if now else lambda: 0.0)


def refusal(guard: Guard, method: str, token: str) -> ServiceError:
    with pytest.raises(ServiceError) as caught:
        guard.admit(method, f"Bearer {token}")
    return caught.value


def methods(module: ModuleType) -> list[str]:
    services = module.DESCRIPTOR.services_by_name.values()
    return [f"/{service.full_name}/{method.name}" for service in services for method in service.methods]


@pytest.mark.parametrize("module", [rollout_pb2, weight_pb2, fleet_pb2])
def test_every_public_method_can_be_allowed_to_a_caller(module: ModuleType) -> None:
    assert methods(module)
    for method in methods(module):
        assert scopes_for(method) - {TokenScope.INTERNAL}, method
        assert TokenScope.METRICS not in scopes_for(method)


@pytest.mark.parametrize("module", [generation_pb2, draft_pb2, bubble_pb2, weight_peer_pb2])
def test_what_is_between_services_is_theirs_alone(module: ModuleType) -> None:
    assert {scopes_for(method) for method in methods(module)} == {frozenset({TokenScope.INTERNAL})}


def test_an_unknown_method_is_closed() -> None:
    assert scopes_for("/paceline.v9.NewService/New") == {TokenScope.INTERNAL}
    assert scopes_for("nonsense") == {TokenScope.INTERNAL}


def test_data_and_control_are_different_scopes() -> None:
    data, control = guard(grant("d", TokenScope.ROLLOUTS)), guard(grant("c", TokenScope.FLEET))
    data.admit(SUBMIT, "Bearer d")
    control.admit(DRAIN, "bearer c")
    error = refusal(data, DRAIN, "d")
    assert isinstance(error, PermissionDenied)
    assert "the scope fleet" in error.message
    assert "of-d has rollouts" in error.message
    (info,) = (each for each in error.details if isinstance(each, error_details_pb2.ErrorInfo))
    assert (info.reason, info.metadata["scope"]) == ("MISSING_SCOPE", "fleet")
    assert isinstance(refusal(control, SUBMIT, "c"), PermissionDenied)
    for each in (data, control):
        each.admit(LIST, f"Bearer {'d' if each is data else 'c'}")


@pytest.mark.parametrize("scope", [each for each in TokenScope if each is not TokenScope.INTERNAL])
def test_no_callers_token_opens_an_instance(scope: TokenScope) -> None:
    error = refusal(guard(grant("t", scope)), WORK, "t")
    assert isinstance(error, PermissionDenied)
    assert "the scope internal" in error.message


def test_weights_are_pushed_with_a_ticket_that_only_their_servicer_knows() -> None:
    guarded = guard(grant("t", TokenScope.ROLLOUTS), own="own")
    (push,) = methods(weight_stream_pb2)
    for token in ("a ticket", ""):
        guarded.admit(push, f"Bearer {token}")
    (fetch,) = methods(weight_peer_pb2)
    for token in ("a ticket", "t"):
        assert isinstance(refusal(guarded, fetch, token), Unauthenticated | PermissionDenied)
    guarded.admit(fetch, "Bearer own")


def test_the_services_token_may_do_everything_as_often_as_it_likes() -> None:
    guarded = guard(grant("t", TokenScope.ROLLOUTS), own="own")
    for method in (SUBMIT, DRAIN, WORK) * 1000:
        guarded.admit(method, "Bearer own")


@pytest.mark.parametrize("given", ["", "Bearer", "Bearer ", "Bearer x", "Basic t", "t", "Bearer tt"])
def test_an_unknown_token_is_nobody(given: str) -> None:
    with pytest.raises(Unauthenticated):
        guard(grant("t", TokenScope.ROLLOUTS)).admit(SUBMIT, given)
    assert guard(grant("t", TokenScope.METRICS)).may_scrape(given) is None


def test_the_hash_is_not_the_token() -> None:
    assert isinstance(
        refusal(guard(grant("t", TokenScope.ROLLOUTS)), SUBMIT, hash_token("t")), Unauthenticated
    )


def test_a_guard_without_tokens_lets_nobody_in() -> None:
    assert isinstance(refusal(guard(), SUBMIT, ""), Unauthenticated)


def test_metrics_have_a_scope_of_their_own() -> None:
    guarded = guard(grant("m", TokenScope.METRICS), grant("r", TokenScope.ROLLOUTS), own="own")
    assert guarded.may_scrape("Bearer m") is True
    assert guarded.may_scrape("Bearer own") is True
    assert guarded.may_scrape("Bearer r") is False


def test_each_token_has_a_rate_of_its_own() -> None:
    times = iter([0.0, 0.0, 0.0, 0.0, 1.0, 1.0])
    guarded = guard(
        grant("slow", TokenScope.ROLLOUTS, requests_per_second=1, burst=2),
        grant("free", TokenScope.ROLLOUTS),
        now=times,
    )
    guarded.admit(SUBMIT, "Bearer slow")
    guarded.admit(SUBMIT, "Bearer slow")
    error = refusal(guarded, SUBMIT, "slow")
    assert isinstance(error, ResourceExhausted)
    assert "1 calls a second" in error.message
    (retry,) = (each for each in error.details if isinstance(each, error_details_pb2.RetryInfo))
    assert retry.retry_delay.seconds == 1
    guarded.admit(SUBMIT, "Bearer free")
    assert next(times) == 0.0
    guarded.admit(SUBMIT, "Bearer slow")


def test_what_a_token_may_not_do_costs_it_nothing() -> None:
    guarded = guard(grant("t", TokenScope.ROLLOUTS, requests_per_second=1, burst=1))
    for _ in range(5):
        assert isinstance(refusal(guarded, DRAIN, "t"), PermissionDenied)
    guarded.admit(SUBMIT, "Bearer t")


def test_a_service_calls_on_behalf_of_somebody_and_nobody_else_does() -> None:
    trusted = guard(grant("t", TokenScope.ROLLOUTS, runs=["a*"]), grant("i", TokenScope.INTERNAL), own="own")
    other = TokenHolder(name="other", runs=("b*",))
    for token in ("own", "i"):
        assert trusted.admit(SUBMIT, f"Bearer {token}", other.metadata()) == other == current_caller()
        assert trusted.admit(SUBMIT, f"Bearer {token}") is None is current_caller()
    mine = trusted.admit(SUBMIT, "Bearer t", other.metadata())
    assert mine is not None
    assert (mine.name, mine.runs) == ("of-t", ("a*",))
    assert current_caller() is mine
    act_for(None)


@pytest.mark.parametrize(
    ("runs", "named"),
    [([None], []), ([["a*"], ["b*"]], []), ([None, ["b*"]], ["of-0"]), ([None, None], ["of-0", "of-1"])],
)
def test_tokens_of_any_run_are_warned_of_where_there_are_others(
    runs: list[list[str] | None], named: list[str]
) -> None:
    grants = [grant(str(n), TokenScope.ROLLOUTS, **({"runs": r} if r else {})) for n, r in enumerate(runs)]
    with structlog.testing.capture_logs() as logs:
        assert guard(*grants, grant("w", TokenScope.WEIGHTS)).warn_of_shared_runs() == named
    assert [log["tokens"] for log in logs] == ([named] if named else [])


def test_the_command_makes_an_entry_that_the_gateway_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bounds = ["--run=team-a-*", "--run=b", "--max-queued-samples=7", "--max-queued-tokens=9"]
    assert run(["token", "--name=trainer", "--scope=rollouts", "--scope=weights", *bounds]) == 0
    said = capsys.readouterr().out
    (token,) = [line for line in said.splitlines() if line.startswith("pl_")]
    file = tmp_path / "tokens.yaml"
    file.write_text(said[said.index("- name") :])
    assert token not in file.read_text()
    guarded = guard_of(ServiceConfig(tokens_file=file))
    assert guarded is not None
    caller = guarded.admit(SUBMIT, f"Bearer {token}")
    assert caller is not None
    assert caller.runs == ("team-a-*", "b")
    assert (caller.max_queued_samples, caller.max_queued_tokens) == (7, 9)
    assert isinstance(refusal(guarded, DRAIN, token), PermissionDenied)


def test_the_command_refuses_a_scope_that_there_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["token", "--name=x", "--scope=everything"]) == 2
    assert "'rollouts'" in capsys.readouterr().err


def test_tokens_are_long_and_differ() -> None:
    tokens = {new_token() for _ in range(100)}
    assert len(tokens) == 100
    assert min(map(len, tokens)) >= 46


@pytest.mark.parametrize(
    ("entries", "wrong"),
    [
        ([{"name": "a", "sha256": "secret-itself", "scopes": ["fleet"]}], "sha256"),
        ([{"name": "a", "sha256": "0" * 64, "scopes": []}], "scopes"),
        ([{"name": "a", "sha256": "0" * 64, "scopes": ["all"]}], "scopes"),
        ([{"name": "a", "sha256": "0" * 64, "scopes": ["fleet"], "requests_per_second": 0}], "requests"),
        ([{"name": "a", "sha256": "0" * 64, "scopes": ["fleet"], "token": "secret-itself"}], "token"),
        ([{"name": n, "sha256": "0" * 64, "scopes": ["fleet"]} for n in "ab"], "two entries"),
        ([{**ENTRY, "runs": []}], "runs"),
        ([{**ENTRY, "runs": ["a b"]}], "runs"),
        ([{**ENTRY, "runs": "a*"}], "runs"),
        ([{**ENTRY, "max_queued_samples": 0}], "max_queued_samples"),
        ([{**ENTRY, "max_queued_tokens": 0.5}], "max_queued_tokens"),
        ([{**ENTRY, "scopes": ["internal"], "runs": ["a*"]}], "internal"),
        ([{**ENTRY, "scopes": ["internal"], "max_queued_tokens": 1}], "internal"),
        ({"a": 1}, "list"),
    ],
)
def test_a_wrong_entry_is_named_and_its_value_is_not_shown(
    tmp_path: Path, entries: object, wrong: str
) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text(yaml.safe_dump(entries))
    with pytest.raises(Unreadable, match=wrong) as caught:
        read_grants(file)
    assert "secret-itself" not in str(caught.value)
    with pytest.raises(ConfigError, match="tokens_file"):
        guard_of(ServiceConfig(tokens_file=file))


def test_entries_may_be_in_the_files_of_a_folder(tmp_path: Path) -> None:
    def entry(name: str) -> str:
        return yaml.safe_dump([{"name": name, "sha256": hash_token(name), "scopes": ["metrics"]}])

    # As Kubernetes mounts two secrets: each file leads to the present version by way of a folder with dots.
    for name in ("a", "b"):
        version = tmp_path / name / "..1"
        version.mkdir(parents=True)
        (version / "tokens.yaml").write_text(entry(name))
        (tmp_path / name / "..data").symlink_to("..1")
        (tmp_path / name / "tokens.yaml").symlink_to("..data/tokens.yaml")
    guarded = guard_of(ServiceConfig(tokens_file=tmp_path))
    assert guarded is not None
    scrape = {name: guarded.may_scrape(f"Bearer {name}") for name in ("a", "b", "c")}
    assert scrape == {"a": True, "b": True, "c": None}

    (tmp_path / "c.yaml").write_text(entry("a"))
    with pytest.raises(ConfigError, match="two entries have the same name"):
        guard_of(ServiceConfig(tokens_file=tmp_path))


def test_a_folder_without_entries_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has a \*\.yaml file"):
        guard_of(ServiceConfig(tokens_file=tmp_path))


def test_no_tokens_no_guard() -> None:
    assert guard_of(ServiceConfig()) is None
