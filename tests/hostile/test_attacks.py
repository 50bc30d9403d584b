"""Every attack that is known, sent to a real gateway and a real facade while another tenant works."""

from __future__ import annotations

import pytest

from tests.hostile import (
    grpc_messages,
    grpc_tenants,
    http_callers,
    http_connections,
    http_sizes,
    local_machine,
    weight_files,
)
from tests.hostile.answers import Attack
from tests.hostile.rig import Rig
from tests.support.soak import Progress, record

ALL: list[Attack] = [
    *grpc_messages.ATTACKS,
    *grpc_tenants.ATTACKS,
    *http_sizes.ATTACKS,
    *http_callers.ATTACKS,
    *http_connections.FLOODS,
    *http_connections.HELD,
    *weight_files.ATTACKS,
    *local_machine.ATTACKS,
]
HELD = "H3"
"""The attacks that take long by waiting."""
FINDINGS = sorted({attack.section for attack in ALL})


@pytest.mark.parametrize("finding", FINDINGS)
def test_attacks_are_refused_and_harm_nobody(rig: Rig, finding: str) -> None:
    """Those of one finding: in the suite another tenant works beside all of them."""
    attacks = [attack for attack in ALL if attack.section == finding and attack.short]
    assert not rig.attack(finding, attacks, at_once=finding == HELD)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
def test_each_attack_in_full_size(rig: Rig) -> None:
    progress, faults = Progress("attacks", len(ALL), "attack"), {}
    rig.patient = True
    for number, attack in enumerate(ALL):
        progress.tell(number, str(attack))
        if found := rig.attack(str(attack), [attack]):
            faults[str(attack)] = found
        # Each time: an attack that ends this very process leaves what came before it.
        record("hostile", {"sent": number + 1, "of": len(ALL), "attacks": rig.figures, "faults": faults})
    assert not faults


def test_no_log_has_a_token(rig: Rig) -> None:
    assert not rig.secrets_told()
