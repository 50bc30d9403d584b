"""Commands of speculation: `paceline policy` for knobs and decisions, `paceline drafter` for the drafter."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

import typer

from paceline.cli.options import (
    GatewayOptions,
    Json,
    add_columns,
    connected,
    plain_console,
    plain_table,
    print_json,
    print_whole,
    show,
)
from paceline.client import Client
from paceline.errors import PacelineError
from paceline.types import Decision, Drafter, EffectiveKnobs, KnobSetting

policy_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
drafter_app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)

_FEW = 5
"""Most instances that are named one by one."""
Run = Annotated[str, typer.Option(help="Knobs of a run. Default: of the fleet.")]
Model = Annotated[str, typer.Option(help="Knobs of a model, as `paceline status` names it. Default: of all.")]
Pool = Annotated[str, typer.Option(help="Knobs of a pool of instances. Default: of all.")]


@policy_app.command("get")
@connected
def get(
    gateway: GatewayOptions, run: Run = "", model: Model = "", pool: Pool = "", as_json: Json = False
) -> None:
    """Show the knobs that are set, and the knobs in use.

    Of the fleet, or of a run, a model or a pool. In use is the configuration of each instance under the settings of
    all scopes; for a run, what its samples get.
    """
    with gateway.open() as client:
        setting = client.knobs(run, model=model, pool=pool)
        unknown = _unknown_scope(client, setting, run, model, pool)
    if unknown:
        typer.echo(f"paceline: {unknown}", err=True)
    if as_json:
        print_json(setting)
        return
    typer.echo(f"revision {setting.revision}" + ("" if setting.knobs else "; no knob is set"))
    _print_knobs(setting)
    for line in _about_instances(setting):
        typer.echo(line)


@policy_app.command("set")
@connected
def set_(
    gateway: GatewayOptions,
    knobs: Annotated[
        list[str],
        typer.Argument(
            metavar="NAME=VALUE",
            help="Knobs, such as mode=toggle speculation=false ladder.on=true. NAME= unsets one.",
        ),
    ],
    run: Run = "",
    model: Model = "",
    pool: Pool = "",
    revision: Annotated[
        int | None,
        typer.Option(help="Fail if there is a later revision than this. Default: the current revision."),
    ] = None,
) -> None:
    """Change knobs. The kill switch is speculation=false: plain decoding on every instance at once."""
    with gateway.open() as client:
        setting = client.knobs(run, model=model, pool=pool)
        changed = KnobSetting(
            setting.revision if revision is None else revision, with_changes(setting.knobs, knobs)
        )
        change = client.set_knobs(run, changed, model=model, pool=pool)
        unknown = _unknown_scope(client, setting, run, model, pool)
    if unknown:
        typer.echo(f"paceline: {unknown}", err=True)
    typer.echo(f"revision {change.revision}; applied by {len(change.applied)} instances")
    if change.pending:
        typer.echo(f"not reached yet, will be retried: {', '.join(change.pending)}")


def _unknown_scope(client: Client, setting: KnobSetting, run: str, model: str, pool: str) -> str:
    """Return a warning if nothing is known by the name of a scope, which may be mistyped; "" otherwise."""
    if run:
        # A token without the scope `rollouts` may not list batches.
        with suppress(PacelineError):
            if next(iter(client.batches(run)), None) is None:
                runs = sorted({each.run_id for each in client.batches()})
                return f"run {run!r} has no batch yet; its knobs wait for one. {_known('runs', runs)}"
    elif (model or pool) and not any(each.instance_ids for each in setting.effective):
        models = sorted({each.model for each in client.instances()}) if model else []
        known = f" {_known('models', models)}" if model else ""
        return f"no instance is of {'model' if model else 'pool'} {model or pool!r} now.{known}"
    return ""


def _known(what: str, names: Sequence[str]) -> str:
    few = ", ".join(names[:_FEW]) + (", ..." if names[_FEW:] else "")
    return f"Known {what}: {few or 'none'}"


@policy_app.command("watch")
@connected
def watch(
    gateway: GatewayOptions,
    run: Annotated[str, typer.Option(help="Decisions of this run and of the fleet. Default: all.")] = "",
    last: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="Begin with the decisions of this many past seconds."),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Print decisions as they are made, until Ctrl-C. With --json, one object per line."""
    with gateway.open() as client:
        try:
            for decision in client.watch_decisions(run, time.time() - last):
                if as_json:
                    print_json(decision, indent=None)
                else:
                    typer.echo(decision_line(decision))
        except KeyboardInterrupt:
            return


def decision_line(decision: Decision) -> str:
    """Return a decision as one line."""
    at = time.strftime("%H:%M:%S", time.localtime(decision.time))
    gain = f" {decision.predicted_gain:+.0%}" if decision.predicted_gain else ""
    return f"{at} {decision.run_id or 'fleet'} {decision.kind}{gain}: {decision.reason}"


def _print_knobs(setting: KnobSetting) -> None:
    """Print each knob with its set value and the values in use."""
    given = dict(knob_values(setting.knobs))
    used = [(each, dict(knob_values(each.knobs))) for each in setting.effective]
    table = plain_table()
    add_columns(table, "knob", "set", whole=True)
    add_columns(table, "in use")
    for name in sorted({*given, *(name for _, values in used for name in values)}):
        values = [(each, values.get(name, "")) for each, values in used]
        table.add_row(name, given.get(name, ""), _in_use(values))
    if table.row_count:
        print_whole(plain_console(), table)


def _in_use(values: Sequence[tuple[EffectiveKnobs, str]]) -> str:
    """Return the value of a knob, or, if instances differ, each value with the instances that use it."""
    by_value: dict[str, list[str]] = {}
    for entry, value in values:
        by_value.setdefault(value, []).extend(entry.instance_ids)
    if len(by_value) < 2:
        return "".join(by_value)
    return ", ".join(f"{value} ({_named(ids)})" for value, ids in by_value.items())


def _about_instances(setting: KnobSetting) -> list[str]:
    known = [each for entry in setting.effective for each in entry.instance_ids]
    lines = [f"in use: on {_named(known)}"] if known else []
    if setting.effective and not known:
        lines.append(
            "in use: on no instance; shown are the values of an instance without its own configuration"
        )
    if setting.pending:
        few = ", ".join(setting.pending[:_FEW]) + (", ..." if setting.pending[_FEW:] else "")
        lines.append(f"unknown on instances that have not confirmed the latest change: {few}")
    return lines


def _named(instance_ids: Sequence[str]) -> str:
    return instance_ids[0] if len(instance_ids) == 1 else f"{len(instance_ids)} instances"


def knob_values(knobs: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yield dotted names and values of knobs, as `paceline policy set` takes them."""
    for name, value in sorted(knobs.items()):
        if isinstance(value, Mapping):
            yield from knob_values(value, f"{prefix}{name}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
            yield f"{prefix}{name}", text


def with_changes(knobs: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """Return the knobs after `name=value` assignments; nested names have dots, an empty value unsets a knob.

    Raises:
        typer.BadParameter: an assignment cannot be parsed.
    """
    changed: dict[str, Any] = json.loads(json.dumps(dict(knobs)))
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not all(name.split(".")):
            raise typer.BadParameter(f"{assignment!r} is not name=value")
        *parents, leaf = name.split(".")
        place = changed
        for parent in parents:
            below = place.setdefault(parent, {})
            if not isinstance(below, dict):
                raise typer.BadParameter(f"{parent} of {assignment!r} is no group of knobs")
            place = below
        if text:
            place[leaf] = _value(text)
        else:
            place.pop(leaf, None)
    return changed


def _value(text: str) -> Any:
    """Parse a text as JSON; return the text itself if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return text


@drafter_app.command("show")
@connected
def show_drafter(gateway: GatewayOptions, as_json: Json = False) -> None:
    """Show the published drafter, and on what it was trained."""
    with gateway.open() as client:
        drafter = client.drafter()
    show(drafter, as_json, drafter_lines)


@drafter_app.command("roll-back")
@connected
def roll_back(
    gateway: GatewayOptions,
    version: Annotated[
        int,
        typer.Option(
            min=0, show_default=False, help="Fail if another version than this is published. Default: any."
        ),
    ] = 0,
    reason: Annotated[str, typer.Option(help="Reason to record in the decision log. Default: none.")] = "",
) -> None:
    """Publish the previous drafter again.

    Instances load it between two steps, and no sample changes. The learner continues from that version. The
    decision log gets an entry (`paceline policy watch`).
    """
    with gateway.open() as client:
        # The call names the version, so that a retry after a lost answer does not roll back twice.
        current = version or client.drafter().drafter_version
        published = client.roll_back_drafter(current, reason)
    typer.echo(f"drafter version {published} is published again, in place of {current}")


def drafter_lines(drafter: Drafter) -> str:
    """Return the state of the learner as lines of text."""
    learned = (
        f"learned from {drafter.samples_used} samples in {drafter.updates} updates, "
        f"last of policy version {drafter.policy_version}"
    )
    past = f"{drafter.rejected_candidates} candidates rejected, {drafter.rollbacks} roll-backs"
    if not drafter.drafter_version:
        return f"no drafter is published yet\n{learned}\n{past}"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(drafter.published_at))
    lines = [f"drafter version {drafter.drafter_version} of {at}, from {drafter.path}"]
    if drafter.acceptance_length:
        lines.append(
            f"{drafter.acceptance_length:.2f} tokens a verification on held-out samples, "
            f"the latest candidate {drafter.candidate_acceptance_length:.2f}"
        )
    return "\n".join([*lines, learned, past])
