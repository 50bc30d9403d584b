"""Settings of the fleet in verl's configuration, and pushes of weights to it.

The settings have no token, because verl prints them: clients find the token as usual
(`paceline.transport.options`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from paceline import AsyncClient, Client, InFlight, Run, Tls, WeightFolder
from paceline import types as t
from paceline.integrations import UnsupportedTrainerError

BACKEND = "paceline"
"""Name of the rollout, of the checkpoint engine, and of their `engine_kwargs`."""


def server_name(replica_rank: int) -> str:
    """Return the name of the Ray actor of a replica, by which trainers find it."""
    return f"{BACKEND}_server_{replica_rank}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """Fleet of a trainer: `engine_kwargs.paceline` of verl's rollout and of its checkpoint engine."""

    address: str | tuple[str, ...]
    """host:port of the gateway; for several shards one address of each deployment."""
    run_id: str = "verl"
    """Name of the training job. Its earlier rollouts of a prompt are drafts, also across restarts."""
    in_flight: InFlight = InFlight.REFUSE
    """Treatment of unfinished samples of other jobs when weights are pushed; verl aborts its own samples before."""
    weights_root: Path | None = None
    """Folder that trainer and instances share, for weights. None: weights are sent over connections."""
    weights_model: Path | None = None
    """With `weights_root`: model folder in Hugging Face layout, whose config is copied to every version."""
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None
    server_name: str | None = None
    """TLS, as in `paceline.Tls`; plain text if none of these fields is set."""
    hints: bool = True
    """Announce the next step if all epochs have the same order (`data.shuffle=False`) and there is one replica."""
    insecure: bool = False
    """Send the token in plain text beyond this machine, on a network that you trust."""

    @classmethod
    def read(cls, given: Mapping[str, Any] | None, place: str) -> Self:
        """Read the settings at `place` of the configuration.

        Raises:
            UnsupportedTrainerError: a setting is missing, unknown or wrong; it names the setting.
        """
        found = {name: value for name, value in (given or {}).items() if value is not None}
        known = {field.name for field in fields(cls)}
        if unknown := sorted(found.keys() - known):
            raise UnsupportedTrainerError(
                f"{place} has {', '.join(unknown)}; known are {', '.join(sorted(known))}"
            )
        if not found.get("address"):
            raise UnsupportedTrainerError(f"{place}.address is not set: it is host:port of a gateway")
        if ("weights_root" in found) != ("weights_model" in found):
            raise UnsupportedTrainerError(f"{place}: weights_root and weights_model belong together")
        address = found.pop("address")
        try:
            in_flight = InFlight(found.pop("in_flight", InFlight.REFUSE))
        except ValueError:
            allowed = ", ".join(InFlight)
            raise UnsupportedTrainerError(f"{place}.in_flight is none of {allowed}") from None
        texts: dict[str, Any] = {
            name: str(value) for name, value in found.items() if name in ("run_id", "server_name")
        }
        flags = {name: found.pop(name) for name in ("hints", "insecure") if name in found}
        for name, value in flags.items():
            if not isinstance(value, bool):
                raise UnsupportedTrainerError(f"{place}.{name} is {value!r}; must be true or false")
        paths: dict[str, Any] = {name: Path(value) for name, value in found.items() if name not in texts}
        return cls(address=_address(address), in_flight=in_flight, **flags, **texts, **paths)

    @property
    def name(self) -> str:
        """The address, or several joined by semicolons."""
        return self.address if isinstance(self.address, str) else ";".join(self.address)

    def client(self) -> Client:
        """Return a client of the fleet."""
        return Client(self.address, **self._credentials())

    def async_client(self) -> AsyncClient:
        """Return an asynchronous client of the fleet."""
        return AsyncClient(self.address, **self._credentials())

    def run(self, client: Client) -> Run:
        """Return the training job, with the weight transport of the settings."""
        if self.weights_root is None or self.weights_model is None:
            return client.run(self.run_id)
        return client.run(self.run_id, weights=WeightFolder(self.weights_root, self.weights_model))

    def _credentials(self) -> dict[str, Any]:
        return {"tls": self._tls(), "insecure": self.insecure}

    def _tls(self) -> Tls | None:
        given = self.ca_file, self.cert_file, self.key_file, self.server_name
        return Tls(*given) if any(given) else None


def _address(given: str | Sequence[str]) -> str | tuple[str, ...]:
    return given if isinstance(given, str) else tuple(str(each) for each in given)


def push(weights: Iterable[tuple[str, Any]], settings: FleetSettings) -> t.UpdateFinished:
    """Push tensors as the next version, reading them in this thread, because reading gathers them.

    All processes of the trainer gather each tensor, and one pushes. The tensors are read to their end even if the
    push fails, so that the other processes do not wait indefinitely.

    Raises:
        PacelineError: the push was refused; the fleet serves the same version as before.
        ValueError: tensors that cannot be written.
    """
    rest = iter(weights)
    try:
        with settings.client() as client:
            return settings.run(client).push_weights(rest, in_flight=settings.in_flight)
    finally:
        drain(rest)


def drain(weights: Iterable[tuple[str, Any]]) -> None:
    """Take part in gathering tensors that another process pushes."""
    for _ in weights:
        pass
