"""Work that one process of a trainer does for all of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from paceline.integrations.errors import RolloutFailedError

T = TypeVar("T")


def gathered(accelerator: Any, own: Sequence[Any]) -> list[list[Any]]:
    """Return the lists of all processes, by rank."""
    if accelerator.num_processes == 1:
        return [list(own)]
    from accelerate.utils import gather_object

    return [list(each) for each in gather_object([list(own)])]


def on_main(accelerator: Any, work: Callable[[], T]) -> T:
    """Do work in the main process and return its result in all. An error is raised in all.

    Raises:
        RolloutFailedError: in another process, when the main one has raised an error, whose text it has.
    """
    if accelerator.num_processes == 1:
        return work()
    from accelerate.utils import broadcast_object_list

    told: list[Any] = [None, None]
    raised: Exception | None = None
    if accelerator.is_main_process:
        try:
            told[0] = work()
        except Exception as error:
            raised, told[1] = error, f"{type(error).__name__}: {error}"
    broadcast_object_list(told, from_process=0)
    if raised is not None:
        raise raised
    if told[1] is not None:
        raise RolloutFailedError(f"the main process failed: {told[1]}")
    result: T = told[0]
    return result
