"""Interface between migration and the engine, and the plain data that passes between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from services.generation.engine.types import EngineRequest
from services.generation.kv_transfer.block_store import Geometry


@dataclass(frozen=True, slots=True)
class Exported:
    """KV of a running sample: its first `tokens` tokens, prompt included, in `blocks`.

    A different number of `preemptions` later means that it is other KV.
    """

    sample_id: str
    tokens: int
    blocks: tuple[int, ...]
    preemptions: int


@dataclass(frozen=True, slots=True)
class Reserved:
    """Blocks for an arriving sample; the prefix cache holds the first `shared_blocks` already."""

    sample_id: str
    blocks: tuple[int, ...]
    shared_blocks: int


@dataclass(frozen=True, slots=True)
class KvSpace:
    """KV blocks that are free or can be freed at once, their total, and the tokens per block."""

    free_blocks: int
    total_blocks: int
    block_size: int


class MigrationEngine(Protocol):
    """Part of `engine.migration.EngineMigration` that migration uses, in the engine thread only."""

    on_withdrawn: Callable[[str], None]

    @property
    def space(self) -> KvSpace: ...
    @property
    def free_capacity(self) -> int: ...

    def open_ports(self, chunk_bytes: int, senders: int, agent: str) -> Geometry: ...
    def own_port(self) -> Any: ...
    def call_ports(self, method: str, *args: object) -> list[Any]: ...
    def blocks_of(self, sample_id: str) -> int: ...
    def export(self, sample_id: str) -> Exported: ...
    def pause(self, exported: Exported) -> Exported: ...
    def resume(self, sample_id: str) -> None: ...
    def reserve(self, request: EngineRequest, capacity: int) -> Reserved: ...
    def enter(self, sample_id: str, new_tokens: list[int]) -> None: ...
    def cancel(self, sample_id: str) -> None: ...
