"""The command line: commands that are registered, tables at 80 columns, and JSON."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints, PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest
import typer
import yaml
from rich.console import Console
from rich.table import Table

from paceline import types as t
from paceline.cli import app, operations, options, policy
from paceline.cli.app import run
from paceline.tokens import hash_token

ROOT = Path(__file__).parents[3]
GONE = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {gone!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Finder())
from paceline.cli import main
sys.exit(main(sys.argv[1:]))
"""


def registered_commands() -> EntryPoints:
    """Return what pyproject.toml registers, which an installation may not know yet."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = project["entry-points"][app.GROUP]
    return EntryPoints(EntryPoint(name, value, app.GROUP) for name, value in named.items())


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registered_commands()
    monkeypatch.setattr(app, "entry_points", lambda **params: found.select(**params))


def without(gone: set[str], *arguments: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run the command line in a folder where some packages are not installed."""
    command = [sys.executable, "-c", GONE.format(gone=gone), *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("command", "option"),
    [("up", "--instances"), ("calibrate", "--max-num-seqs"), ("simulate", "--deadline")],
)
def test_commands_that_start_services_are_registered(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([command, "--help"]) == 0
    assert option in capsys.readouterr().out


@pytest.mark.usefixtures("installed")
def test_help_lists_all_commands_with_what_they_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    own = (
        "status",
        "batches",
        "cancel",
        "end-run",
        "pause",
        "resume",
        "drain",
        "policy",
        "drafter",
        "weights",
    )
    for command in (*own, "report", "token", "up", "doctor", "calibrate", "simulate", "demo", "download"):
        (line,) = [line for line in lines if line.split()[:1] == [command]]
        assert len(line.split()) > 3
        assert "Not available" not in line
        assert not line.endswith("..."), "it is whole at 80 columns"


@pytest.mark.usefixtures("installed")
def test_help_has_every_command_in_a_section_and_examples_that_are_taken(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["--help"]) == 0
    said = capsys.readouterr().out
    assert [title for title in (*app.SECTIONS, "Others") if f"\n{title}:\n" in said] == list(app.SECTIONS)
    examples = re.findall(r"^ +paceline (\S+)((?: \S+)*)", said.partition("Examples:")[2], re.MULTILINE)
    assert len(examples) == 5
    for command, words in examples:
        assert run([command, "--help"]) == 0
        shown = capsys.readouterr().out
        given = {each for each in words.split() if each.startswith("--")}
        assert given >= {option for option, text in options_of(shown).items() if "[required]" in text}
        assert given <= options_of(shown).keys(), command


def options_of(shown: str) -> dict[str, str]:
    """Return the text on each option in the help of a command."""
    rows = re.split(r"\n  (?=-)", shown.partition("\nOptions:")[2].partition("\n\n")[0])
    return {row.split()[0]: " ".join(row.split()) for row in rows[1:]}


OWN = ("status", "batches", "cancel", "end-run", "report", "pause", "resume", "drain", "token")
GROUPS = {"policy": ("get", "set", "watch"), "drafter": ("show", "roll-back"), "weights": ("show", "abort")}


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "command",
    [
        *([each] for each in (*OWN, *sorted(registered_commands().names - {"demo"}))),
        *([group, each] for group, below in GROUPS.items() for each in below),
    ],
    ids=" ".join,
)
def test_help_names_values_and_defaults(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "-h"]) == 0
    found = options_of(capsys.readouterr().out)
    assert found.keys() >= {"-h,"}
    for option, text in found.items():
        assert not re.search(r"<(str|int|float|path|list\[str\])", text), "a type says nothing"
        value = re.match(r"--\S+ ([A-Z:=]+|<\S+>) ", text)
        if value and "[required]" not in text:
            assert re.search(r"[Dd]efault: ", text), f"{option} does not say what holds without it"


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("group", GROUPS)
def test_the_commands_of_a_group_are_listed_with_a_whole_sentence(
    group: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([group, "-h"]) == 0
    lines = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    assert [line.split()[0] for line in lines] == list(GROUPS[group])
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)


@pytest.mark.parametrize("name", sorted(registered_commands().names))
def test_what_is_listed_of_a_command_is_what_it_says_of_itself(name: str) -> None:
    (entry,) = registered_commands().select(name=name)
    whole = typer.main.get_command(entry.load()).help or ""
    assert whole.startswith(app.brief(entry).removesuffix("."))
    assert len(app.brief(entry)) < 80


LISTING = """
import os, sys
from paceline.cli.app import run
run(["-h"])
os.environ |= {"_PACELINE_COMPLETE": "complete_bash", "COMP_WORDS": "paceline d", "COMP_CWORD": "1"}
run([])
print([each for each in sys.modules if each.partition(".")[0] in ("services", "examples")])
"""


def test_listing_and_completing_commands_imports_none_of_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LISTING], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-6:] == ["drain", "drafter", "demo", "doctor", "download", "[]"]


def test_the_sdk_s_commands_work_without_services() -> None:
    gone = {"services", "kernels", "examples", "yaml", "redis", "structlog", "prometheus_client"}
    for command in (["status"], ["policy", "get"], ["drafter", "show"]):
        done = without(gone, *command, "--address=127.0.0.1:1", "--json")
        assert (done.returncode, done.stderr[:20]) == (1, "paceline: UNAVAILABL"), done.stderr
    done = without(gone, "report", "--address=127.0.0.1:1")
    assert (done.returncode, done.stderr[:20]) == (1, "paceline: UNAVAILABL"), done.stderr
    done = without(gone, "token", "--name=trainer", "--scope=rollouts")
    assert done.returncode == 0, done.stderr


def test_the_demo_is_found_from_any_folder(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("paceline")
    done = subprocess.run([script, "demo", "--help"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--prompts" in done.stdout


def test_without_the_demo_its_command_says_what_works(tmp_path: Path) -> None:
    done = without({"examples"}, "demo", "--steps=1", folder=tmp_path)
    assert done.returncode == 2
    assert "in a checkout of the repository" in done.stderr
    advised = re.findall(r"`make ([a-z-]+)`", done.stderr)
    assert advised == ["setup", "demo"]
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(advised) <= set(targets)


@pytest.mark.parametrize(
    "place", ["services.local.up:gone", "services.local.gone:app", "services.gone.up:app", None]
)
def test_metadata_of_another_version_is_a_sentence(
    place: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = EntryPoints([EntryPoint("up", place, app.GROUP)] if place else [])
    monkeypatch.setattr(app, "entry_points", lambda **params: found.select(**params))
    assert run(["up", "--model=m"]) == 2
    said = capsys.readouterr().err
    assert said.startswith(
        "paceline: up is of another version than the rest: install again, by `make setup` or pip "
    )
    assert run(["-h"]) == 0


def test_a_version_that_is_not_installed_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(app, "version", version)
    assert run(["--version"]) == 1
    assert "it is not installed: `make setup`, or pip install" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_its_extra_the_command_line_says_what_to_install(package: str) -> None:
    done = without({package}, "status")
    assert done.returncode == 2
    assert f"{package} is not installed" in done.stderr
    assert "pip install '.[cli]' in a checkout" in done.stderr


LONG = "paceline-generation-h100-spot-17"
HOST = f"{LONG}.paceline-generation.ml.svc.cluster.local:7401"
INSTANCES = tuple(
    t.Instance(
        instance_id=name,
        epoch=2,
        address=HOST,
        state=state,
        policy_version=123456,
        load=t.InstanceLoad(256, 1024, 1.0, 1.2345, 987_654_321, 10),
        max_running=1024,
        max_model_len=32768,
        vocab_size=1000,
        model="Qwen3-8B",
        device="NVIDIA H200",
        registered_at=1.0,
        metrics_address="10.0.0.1:9100",
    )
    for name, state in ((LONG, t.InstanceState.DRAINING), ("i1", t.InstanceState.SERVING))
)


def _named(name: str) -> tuple[t.Instance, ...]:
    return (replace(INSTANCES[0], instance_id=name),)


VERSIONS = t.Versions(5, 2, "/weights/5", "sha256:0", "", ())
_SET = {"mode": "toggle", "ladder": {"on": True, "lengths": [1, 2]}}
KNOBS = t.KnobSetting(
    3,
    _SET,
    (
        t.EffectiveKnobs({**_SET, "draft_cap": 16}, ("i1", LONG)),
        t.EffectiveKnobs({**_SET, "draft_cap": 8}, ("i9",)),
    ),
    ("i7",),
)
DECISIONS = (
    t.Decision(1.0, "toggle", "on at 3 samples", 0.25, {"samples": 3}, "run"),
    t.Decision(2.0, "knobs", "mode", 0.0, {}),
)
DRAFTER = t.Drafter(3, 1.0, "/weights/drafter/3", 9, 400, 12, 2.125, 2.5, 4, 1)


BATCHES = (
    t.BatchStatus("run-a", "b1", 7, 3, time.time() - 90, 256, 250, 100, 9),
    t.BatchStatus("run-b", "b2", 8, 3, time.time(), 4, 4, 0, 9),
    t.BatchStatus("run-b", "b3", 9, 3, time.time(), 4, 0, 0, 9, open=True),
)


class ClientDouble:
    """A client with answers of its own."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def instances(self) -> tuple[t.Instance, ...]:
        return INSTANCES

    def versions(self) -> t.Versions:
        return VERSIONS

    def watch_fleet(self) -> Iterator[tuple[t.Instance, ...]]:
        yield INSTANCES
        yield INSTANCES[1:]
        raise KeyboardInterrupt

    def batches(self, run_id: str = "") -> Iterator[t.BatchStatus]:
        yield from (each for each in BATCHES if run_id in ("", each.run_id))

    def cancel(self, run_id: str, batch_id: str) -> int:
        return {("run-a", "b1"): 3}[run_id, batch_id]

    def end_run(self, run_id: str) -> t.RunEnded:
        return {"run-a": t.RunEnded(2, 5)}[run_id]

    def pause(self, instances: Sequence[str]) -> tuple[str, ...]:
        return tuple(instances) or ("i1", LONG)

    def resume(self, instances: Sequence[str]) -> tuple[str, ...]:
        return tuple(instances)

    def drain(self, instance: str) -> int:
        return {"i1": 7}[instance]

    def knobs(self, *_: Any, **__: Any) -> t.KnobSetting:
        return KNOBS

    def set_knobs(self, *_: Any, **__: Any) -> t.KnobChange:
        return t.KnobChange(4, ("i1",), ("i7",))

    def watch_decisions(self, *_: Any) -> Iterator[t.Decision]:
        yield from DECISIONS

    def drafter(self) -> t.Drafter:
        return DRAFTER


@pytest.fixture
def connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "Client", lambda *_, **__: ClientDouble())


@contextmanager
def at_80_columns() -> Iterator[Console]:
    console = options.plain_console()
    console.width, console.file = 80, io.StringIO()
    yield console


@pytest.mark.parametrize("width", [40, 60])
def test_names_and_states_are_whole_on_a_narrow_terminal(width: int) -> None:
    idle = replace(INSTANCES[1], load=t.InstanceLoad(0, 0, 0.0, 0.0, 123, 10))
    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    operations._print_fleet(console, (*INSTANCES, replace(idle, instance_id="i2")), VERSIONS)
    assert isinstance(console.file, io.StringIO)
    lines = [line.split() for line in console.file.getvalue().splitlines()]
    assert [line[1] for line in lines if line[:1] == ["i2"]] == ["serving", "serving", "Qwen3-8B"]
    assert next(line for line in lines if line[:1] == [LONG])[1:] == [
        "draining",
        "123456",
        "256/1024",
        "1024",
    ]
    assert ["i2", "serving", "0%", "123"] in lines, "an idle instance has no step time"


def printed(table: Table) -> list[str]:
    with at_80_columns() as console:
        console.print(table)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue().splitlines()


def test_the_load_of_instances_is_readable_at_80_columns() -> None:
    with at_80_columns() as console:
        tables = operations.load_tables(INSTANCES, console)
        # Names of a machine leave room for one table, and those of a cluster for two.
        assert len(operations.load_tables(INSTANCES[1:], console)) == 1
    lines = [line for each in tables for line in printed(each)]
    assert max(map(len, lines)) <= 80
    rows = [line.split() for line in lines if line.startswith(f"{LONG} ")]
    assert [each[1] for each in rows] == ["draining", "draining"], "names are whole"
    shown = {value for row in rows for value in row}
    assert shown >= {"123456", "256/1024", "1024", "100%", "1234.5", "988M"}


def test_the_places_of_instances_are_readable_at_80_columns() -> None:
    lines = printed(operations.place_table(INSTANCES))
    assert max(map(len, lines)) <= 80
    assert lines[1].startswith(f"{LONG} ")
    assert "Qwen3-8B" in lines[1]
    shown = "".join("".join(line.split()) for line in lines)
    assert "…" not in shown


def test_a_name_that_is_longer_than_the_terminal_is_whole() -> None:
    name = "x" * 90
    with at_80_columns() as console:
        for table in (*operations.load_tables(_named(name), console), operations.place_table(_named(name))):
            operations.print_whole(console, table)
        assert isinstance(console.file, io.StringIO)
        assert console.file.getvalue().count(f"{name} ") == 3


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0"), (9_999, "9999"), (12_345, "12.3k"), (99_960, "100k"), (999_600, "1.0M"), (10**12, "1T")],
)
def test_counts_are_short(count: int, shown: str) -> None:
    assert operations.short_count(count) == shown


@pytest.mark.usefixtures("connected")
def test_brackets_and_colons_are_no_markup_and_states_have_colours(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    named = replace(INSTANCES[1], address="[fd00:100::5]:7401", model="/models/x[/y]", device="[red]")
    knobs = t.KnobSetting(3, {}, (t.EffectiveKnobs({"drafters": ["suffix", "reference"]}, ("[i]",)),))
    module = sys.modules[__name__]
    monkeypatch.setattr(module, "INSTANCES", (replace(named, instance_id="i[b]1"),))
    monkeypatch.setattr(module, "VERSIONS", replace(VERSIONS, policy_path="/weights/[b]/5"))
    monkeypatch.setattr(module, "BATCHES", (replace(BATCHES[0], run_id="run[a]", batch_id=":key:"),))
    monkeypatch.setattr(module, "KNOBS", knobs)
    for name, value in {"COLUMNS": "200", "FORCE_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    for command, shown in {
        "status": ("i[b]1", *(named.address, named.model, named.device), "/weights/[b]/5", "\x1b[32mserving"),
        "batches": ("run[a]", ":key:"),
        "policy get": ('["suffix","reference"]',),
    }.items():
        assert run(command.split()) == 0
        said = capsys.readouterr().out
        assert [text for text in shown if text not in said] == []


@pytest.mark.usefixtures("connected")
def test_status_in_words_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status"]) == 0
    assert "Policy version 5 from /weights/5, drafter version 2" in capsys.readouterr().out
    assert run(["status", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [each["instance_id"] for each in shown["instances"]] == [LONG, "i1"]
    assert shown["instances"][1]["state"] == "serving"
    assert shown["instances"][1]["load"]["generated_tokens"] == 987_654_321
    assert shown["versions"]["policy_version"] == 5


@pytest.mark.usefixtures("connected")
def test_knobs_in_words_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policy", "get"]) == 0
    assert [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()] == [
        "revision 3",
        "knob set in use",
        "draft_cap 16 (2 instances), 8 (i9)",
        "ladder.lengths [1,2] [1,2]",
        "ladder.on true true",
        "mode toggle toggle",
        "in use: on 3 instances",
        "unknown on instances that have not confirmed the latest change: i7",
    ]
    lines = [f"{name}={value}" for name, value in policy.knob_values(KNOBS.knobs)]
    assert policy.with_changes({}, lines) == KNOBS.knobs
    assert run(["policy", "get", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["revision"], shown["knobs"], shown["pending"]) == (3, KNOBS.knobs, ["i7"])
    assert [each["instance_ids"] for each in shown["effective"]] == [["i1", LONG], ["i9"]]


def test_knobs_of_a_fleet_without_instances_are_not_said_to_be_in_use(
    capsys: pytest.CaptureFixture[str], connected: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = t.KnobSetting(0, {}, (t.EffectiveKnobs({"mode": "planner"}, ()),))
    monkeypatch.setattr(sys.modules[__name__], "KNOBS", default)
    assert run(["policy", "get"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["mode", "planner"] in rows
    assert rows[0][-4:] == ["no", "knob", "is", "set"]
    assert rows[-1][:5] == ["in", "use:", "on", "no", "instance;"]


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize(
    ("scope", "said"),
    [
        ([], ""),
        (["--run=run-a"], ""),
        (["--model=Qwen3-8B"], ""),
        (["--run=nosuch"], "run 'nosuch' has no batch yet; its knobs wait for one. Known runs: run-a, run-b"),
        (["--model=Qwen3"], "no instance is of model 'Qwen3' now. Known models: Qwen3-8B"),
        (["--pool=nosuch"], "no instance is of pool 'nosuch' now."),
    ],
)
def test_knobs_of_a_name_that_nobody_has_are_set_with_a_warning(
    scope: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if scope in (["--model=Qwen3"], ["--pool=nosuch"]):
        default = t.KnobSetting(0, {}, (t.EffectiveKnobs({"mode": "planner"}, ()),))
        monkeypatch.setattr(sys.modules[__name__], "KNOBS", default)
    for command in (["policy", "set", "draft_cap=3"], ["policy", "get"]):
        assert run([*command, *scope]) == 0
        shown = capsys.readouterr()
        assert shown.err == (f"paceline: {said}\n" if said else "")
        assert "revision " in shown.out


@pytest.mark.usefixtures("connected")
def test_decisions_in_words_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["policy", "watch"]) == 0
    assert "run toggle +25%: on at 3 samples" in capsys.readouterr().out
    assert run(["policy", "watch", "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["kind"] for each in shown] == ["toggle", "knobs"]
    assert shown[0]["details"] == {"samples": 3}


@pytest.mark.usefixtures("connected")
def test_the_drafter_in_words_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["drafter", "show"]) == 0
    assert "drafter version 3 of " in capsys.readouterr().out
    assert run(["drafter", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["acceptance_length"] == 2.125


def test_a_token_in_words_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--name=1e5", "--scope=weights", "--scope=rollouts", "--requests-per-second=2.5"]
    assert run(["token", *options]) == 0
    said = capsys.readouterr().out
    (secret,) = [line for line in said.splitlines() if line.startswith("pl_")]
    expected = {
        "name": "1e5",
        "sha256": hash_token(secret),
        "scopes": ["rollouts", "weights"],
        "requests_per_second": 2.5,
    }
    assert yaml.safe_load(said[said.index("- name") :]) == [expected]
    assert run(["token", *options, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["entry"]["sha256"] == hash_token(shown["token"])


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (["--name=", "--scope=fleet"], "name"),
        (["--name=a b", "--scope=fleet"], "name"),
        (["--name=x", "--scope=fleet", "--requests-per-second=0"], "requests_per_second"),
        (["--name=x", "--scope=fleet", "--requests-per-second=inf"], "requests_per_second"),
        (["--name=x", "--scope=all"], "scopes"),
        (["--name=x", "--scope=rollouts", "--run="], "runs"),
        (["--name=x", "--scope=rollouts", "--run=a", "--run=b c"], "runs"),
        (["--name=x", "--scope=rollouts", *(f"--run=r{n}" for n in range(65))], "runs"),
        (["--name=x", "--scope=rollouts", "--max-queued-samples=0"], "max_queued_samples"),
        (["--name=x", "--scope=rollouts", "--max-queued-tokens=-1"], "max_queued_tokens"),
        (["--name=x", "--scope=internal", "--run=a"], "scopes"),
    ],
)
def test_a_wrong_option_of_a_token_is_named(
    options: list[str], field: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["token", *options]) == 2
    assert capsys.readouterr().err.startswith(f"paceline: {field}: ")


def test_the_processes_of_a_local_platform_are_readable_at_80_columns() -> None:
    from services.local.up import processes_table

    ready = SimpleNamespace(address="127.0.0.1:54321", metrics_port=54322)
    names = ("gateway", "instance-12", "draft-store-1", "reallocator")
    processes = [
        SimpleNamespace(
            spec=SimpleNamespace(name=name, cores=(10, 11), environment={}), pid=4194304, ready=ready
        )
        for name in names
    ]
    redis = SimpleNamespace(pid=4194303, url="redis://127.0.0.1:54323/0")
    lines = printed(processes_table(cast(Any, SimpleNamespace(processes=processes, redis=redis))))
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines[1:6]] == [*names, "redis"], "nothing is folded"
    assert all(
        value in lines[1] for value in ("4194304", "127.0.0.1:54321", "127.0.0.1:54322", "core 10, 11")
    )


@pytest.mark.usefixtures("connected")
def test_the_fleet_is_shown_again_at_each_change(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--watch", "--json"]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [len(each["instances"]) for each in shown] == [2, 1]
    assert run(["status", "--watch"]) == 0
    assert capsys.readouterr().out.count("Policy version 5") == 2


@pytest.mark.usefixtures("connected")
def test_batches_in_words_and_in_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["batches"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [row[-1] for row in rows] == ["work", "done", "open"]
    assert rows[0][:6] == ["run-a", "b1", "7", "3", "250/256", "100"]
    assert run(["batches", "--run=run-b", "--json"]) == 0
    assert [each["batch_id"] for each in json.loads(capsys.readouterr().out)] == ["b2", "b3"]
    assert run(["batches", "--run=none"]) == 0
    assert capsys.readouterr().out == "there are no batches of none\n"


@pytest.mark.usefixtures("connected")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["cancel", "run-a", "b1"], "3 samples of batch b1 were unfinished and are cancelled"),
        (["end-run", "run-a"], "run-a has ended: 2 batches, of which 5 samples were unfinished"),
        (["pause"], f"paused: i1, {LONG}"),
        (["pause", "i1"], "paused: i1"),
        (["resume"], "no instance is resumed"),
        (["drain", "i1"], "i1 is drained; 7 samples continue elsewhere"),
        (["weights", "show"], "Policy version 5 from /weights/5, drafter version 2"),
    ],
)
def test_the_outcome_of_an_operation_is_printed(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 0
    assert capsys.readouterr().out == f"{said}\n"


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.split()[0] == "paceline"
