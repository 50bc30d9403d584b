"""Checks of the JSON schemas of samples, beside the engine: to compile one may take a second."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import structlog

from paceline.internal.v1 import generation_pb2 as pb
from services.contracts.sampling import ModelLimits, Sampling, resolve

_log = structlog.get_logger(__name__)

_THREADS = 2


class SchemaChecks:
    """Compiles schemas in threads of its own, so that the engine finds them compiled."""

    def __init__(self, check: Callable[[Sampling, Sequence[int]], str], seconds: float = 10.0) -> None:
        """Check by `check`, which returns what is wrong; a schema that takes longer than `seconds` is refused."""
        self._check = check
        self._seconds = seconds
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="schemas")

    @classmethod
    def of_model(cls, folder: Path, limits: ModelLimits) -> SchemaChecks:
        """Return the checks of an instance whose engine is there."""
        # Imports vLLM, which the engine has done first.
        from services.generation.engine.grammars import schema_fault

        return cls(partial(schema_fault, folder, limits))

    async def fault(self, item: pb.WorkItem) -> str:
        """Return what is wrong with the schema of an item; "" if nothing is."""
        sampling, prefix = resolve(item.sampling), list(item.prefix_token_ids)
        checked = asyncio.get_running_loop().run_in_executor(self._threads, self._check, sampling, prefix)
        try:
            return await asyncio.wait_for(checked, self._seconds)
        except TimeoutError:
            return f"is too complicated: it could not be compiled in {self._seconds:g} s"
        except Exception as error:
            _log.exception("schema_check_failed")
            return f"could not be compiled ({type(error).__name__})"
