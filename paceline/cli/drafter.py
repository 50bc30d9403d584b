"""`paceline drafter show | roll-back`: the draft model that is trained online."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from paceline.cli.options import GatewayOptions, Json, connected
from paceline.cli.output import print_json
from paceline.types import Drafter

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command("show")
@connected
def show(gateway: GatewayOptions, as_json: Json = False) -> None:
    """Show the published drafter. Includes its acceptance length and the samples that it was trained on."""
    with gateway.open() as client:
        drafter = client.drafter()
    if as_json:
        print_json(drafter)
    else:
        typer.echo(drafter_lines(drafter))


@app.command("roll-back")
@connected
def roll_back(
    gateway: GatewayOptions,
    version: Annotated[
        int, typer.Option(min=0, show_default=False, help="Fail if another version than this is published.")
    ] = 0,
    reason: Annotated[str, typer.Option(help="Reason to record in the decision log.")] = "",
) -> None:
    """Publish the drafter before the current one again.

    Instances load it between two steps and no sample changes. The learner continues from that version.
    The decision log has an entry: paceline policy watch
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
