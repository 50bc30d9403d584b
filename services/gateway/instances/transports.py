"""Transports of weights, as the gateway sees them. A new one is one entry of `TRANSPORTS`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from paceline.errors import Violation
from paceline.v1 import weight_pb2 as pb
from services.contracts.errors import InvalidArgument, Unimplemented
from services.contracts.files import check_weight_folder
from services.gateway.state.update_book import WeightUpdate

HandedOver = pb.DiskWeights | pb.StreamedWeights
"""Weights as the trainer hands them over: messages of UpdateWeights."""


@dataclass(frozen=True, slots=True)
class GatewayTransport:
    """Staging of the weights of one transport on the instances."""

    number: int
    """Number in the protocol."""
    source: str
    """Field of UpdateWeights with which the trainer hands them over."""
    pushed: bool
    """The trainer sends bytes under a ticket once the update is started. False: the weights are in a folder."""
    refusals: frozenset[grpc.StatusCode]
    """Codes of an instance's error that are a verdict on the weights for all instances."""
    check: Callable[[Any, Path | None], None]
    """Raises ServiceError for what is handed over and cannot be staged; the second argument is `weights_root`."""
    outcome: Callable[[Any], tuple[str, str]]
    """Returns the folder (empty for pushed weights) and the checksum that the trainer announces."""

    @property
    def name(self) -> str:
        """Name in the protocol, without its prefix."""
        return pb.WeightTransport.Name(self.number).removeprefix("WEIGHT_TRANSPORT_")


def _check_folders(disk: pb.DiskWeights, root: Path | None) -> None:
    check_weight_folder(disk.path, root)
    if disk.delta:
        check_weight_folder(disk.delta, root, field="disk.delta")


# All instances read the same folder, so damage is a verdict for all. Pushed weights may be damaged on one instance.
DISK = GatewayTransport(
    number=pb.WEIGHT_TRANSPORT_DISK,
    source="disk",
    pushed=False,
    refusals=frozenset({grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.DATA_LOSS}),
    check=_check_folders,
    outcome=lambda disk: (disk.path, ""),
)
STREAM = GatewayTransport(
    number=pb.WEIGHT_TRANSPORT_STREAM,
    source="streamed",
    pushed=True,
    refusals=frozenset({grpc.StatusCode.INVALID_ARGUMENT}),
    check=lambda streamed, root: None,
    outcome=lambda streamed: ("", streamed.checksum),
)
TRANSPORTS = {each.number: each for each in (DISK, STREAM)}
_BY_MESSAGE = {pb.DiskWeights: DISK, pb.StreamedWeights: STREAM}


def transport_of(update: WeightUpdate) -> GatewayTransport:
    """Return the transport with which an update was started."""
    return STREAM if update.ticket else DISK


def check_requested(number: int) -> list[Violation]:
    """Return what is wrong with a requested transport. Unimplemented: it has its place in the protocol alone."""
    if number == pb.WEIGHT_TRANSPORT_DEVICE:
        text = (
            "weights do not go from device to device: use transport STREAM, or DISK with a shared file system"
        )
        raise Unimplemented("DEVICE", text)
    if number in TRANSPORTS:
        return []
    allowed = " or ".join(each.name for each in TRANSPORTS.values())
    return [Violation("transport", f"is {number}; must be {allowed}")]


def transport_for(source: HandedOver, update: WeightUpdate) -> GatewayTransport:
    """Return the transport of handed-over weights; InvalidArgument: the update was started with another one."""
    found, started = _BY_MESSAGE[type(source)], transport_of(update)
    if found is not started:
        text = f"is set; the transport of this update is {started.name}"
        raise InvalidArgument([Violation(found.source, text)])
    return found
