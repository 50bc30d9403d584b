"""Triton's interpreter, made quicker: for processes that were started with it.

While a kernel runs the interpreter replaces the members of Triton's language by those that compute with NumPy. It
does so again with every call of one jitted function by another, for nothing, which takes half of all its time. It
also computes whether each sum and product of integers overflows, which only debug mode looks at.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace as changed
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def make_quicker() -> None:
    """Let launches replace each module of the language once, and compute overflows in debug mode only."""
    builder = interpreter.interpreter_builder
    builder.options = changed(builder.options, sanitize_overflow=builder.options.debug)
    replace: Callable[[Any], Any] = interpreter._patch_lang
    launch = interpreter.GridExecutor.__call__
    replaced: set[tuple[bool, bool]] = set()
    seen_by: dict[int, tuple[bool, bool]] = {}

    def seen(function: Any) -> tuple[bool, bool]:
        """Which modules of the language a function sees: the interpreter replaces those."""
        place = id(function.__globals__)
        if place not in seen_by:
            values = [value for value in function.__globals__.values() if value is tl or value is tl.core]
            seen_by[place] = (tl in values, tl.core in values)
        return seen_by[place]

    def replace_first(function: Any) -> Any:
        modules = seen(function)
        if modules not in replaced:
            replaced.add(modules)
            return replace(function)
        return None

    @functools.wraps(launch)
    def launched(self: Any, *args: Any, **kwargs: Any) -> None:
        replaced.clear()
        launch(self, *args, **kwargs)

    interpreter._patch_lang = replace_first
    interpreter.GridExecutor.__call__ = launched
