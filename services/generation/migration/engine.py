"""What migration uses of the engine, and plain data that passes between the two."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from services.generation.engine.types import SampleRequest
from services.generation.migration.store import Geometry


@dataclass(frozen=True, slots=True)
class Exported:
    """KV of a sample that is here: the first `tokens` tokens, prompt included, in `blocks`.

    `preemptions` tells whether it is still the same KV later on.
    """

    sample_id: str
    tokens: int
    blocks: tuple[int, ...]
    preemptions: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks for a sample that is to come; the first `shared_blocks` are there already, from the prefix cache."""

    sample_id: str
    blocks: tuple[int, ...]
    shared_blocks: int


@dataclass(frozen=True, slots=True)
class KvSpace:
    """KV blocks that are free or can be freed at once, all there are, and tokens in one."""

    free_blocks: int
    total_blocks: int
    block_size: int


class MigrationEngine(Protocol):
    """See `services.generation.engine.migration.EngineMigration`. In the engine thread only."""

    on_withdrawn: Callable[[str], None]

    @property
    def ranks(self) -> int: ...
    @property
    def space(self) -> KvSpace: ...
    @property
    def free_seats(self) -> int: ...

    def open_ports(self, chunk_bytes: int, senders: int, agent: str) -> Geometry: ...
    def own_port(self) -> Any: ...
    def call_ports(self, method: str, *args: object) -> list[Any]: ...
    def blocks_of(self, sample_id: str) -> int: ...
    def export(self, sample_id: str) -> Exported: ...
    def freeze(self, exported: Exported) -> Exported: ...
    def thaw(self, sample_id: str) -> None: ...
    def reserve(self, request: SampleRequest, capacity: int) -> Reserved: ...
    def enter(self, sample_id: str, new_tokens: list[int]) -> None: ...
    def cancel(self, sample_id: str) -> None: ...
