"""`paceline drafter show | roll-back`: the drafter that is trained online."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from paceline.cli.connection import Address, CaFile, CertFile, KeyFile, Token, connect
from paceline.types import Drafter

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@app.command("show")
def show(
    address: Address = "127.0.0.1:7400",
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    token: Token = None,
) -> None:
    """Shows what is published, how well it is accepted, and what it was learned from."""
    with connect(address, token, ca_file, cert_file, key_file) as client:
        typer.echo(drafter_lines(client.drafter()))


@app.command("roll-back")
def roll_back(
    address: Address = "127.0.0.1:7400",
    version: Annotated[
        int, typer.Option(min=0, help="Only if this version is published. Default: whichever is.")
    ] = 0,
    reason: Annotated[str, typer.Option(help="Stands in the decision that tells of it.")] = "",
    ca_file: CaFile = None,
    cert_file: CertFile = None,
    key_file: KeyFile = None,
    token: Token = None,
) -> None:
    """Goes back to the drafter that was published before. Instances take it between two steps; no sample changes.

    The learner goes on from that version. To see why it was left later: paceline policy watch
    """
    with connect(address, token, ca_file, cert_file, key_file) as client:
        # Named in the call, so that one that is made again after a lost answer does not go back twice.
        left = version or client.drafter().version
        published = client.roll_back_drafter(left, reason)
    typer.echo(f"drafter version {published} is published again, in place of {left}")


def drafter_lines(drafter: Drafter) -> str:
    """What the learner tells, in words."""
    learned = (
        f"learned from {drafter.samples_used} samples in {drafter.updates} updates, "
        f"last of policy version {drafter.policy_version}"
    )
    past = f"{drafter.rejected_candidates} candidates rejected, {drafter.roll_backs} roll-backs"
    if not drafter.version:
        return f"no drafter is published yet\n{learned}\n{past}"
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(drafter.published))
    lines = [f"drafter version {drafter.version} of {at}, from {drafter.path}"]
    if drafter.acceptance_length:
        lines.append(
            f"{drafter.acceptance_length:.2f} tokens a verification on held-out samples, "
            f"the latest candidate {drafter.candidate_acceptance_length:.2f}"
        )
    return "\n".join([*lines, learned, past])
