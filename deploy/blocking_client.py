"""Write the blocking client: a synchronous class for each asynchronous one, with a thin method for each method.

`scripts/blocking-client` runs it; `--check`, part of `make lint`, fails if a file is not current.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "paceline"
FILES = {
    "batches/blocking.py": ("AsyncRollout", "AsyncOpenBatch", "AsyncSession", "AsyncSessions"),
    "client.py": ("AsyncClient", "AsyncRun"),
}
"""Files, with the asynchronous classes whose faces they have."""
CORES = [name for names in FILES.values() for name in names]
BASES = {"AsyncOpenBatch": "AsyncRollout"}
"""Classes whose faces inherit from the face of another one."""
INTERNAL = {
    *("call", "events", "run_work", "send_batch", "post_ack", "dial", "sleep", "shards"),
    *("continue_sample", "events_with_calls", "wait_for", "leave", "take", "called", "ended", "send"),
    "AsyncRollout.begin",
}
"""Members that only asynchronous classes use."""
Classes = dict[str, tuple[ast.ClassDef, str]]
"""Classes by name, each with the text of its module."""
_HEADS = {
    "batches/blocking.py": '''\
"""The batches of the synchronous client. Written by scripts/blocking-client from the asynchronous classes."""
''',
    "client.py": '''\
"""The synchronous client: a training job, its rollouts and its sessions.

    with paceline.Client("127.0.0.1:7400") as client, client.run("run-1", seed=7) as run:
        for step in range(steps):
            samples = list(run.rollout(step, groups, SamplingParams(max_tokens=512)))
            run.push_weights(learner.update(samples))

Written by scripts/blocking-client: change the asynchronous classes instead. Each class here is the face of one of
them (see `paceline.blocking`). Methods raise `PacelineError`.
"""
''',
}
_IMPORTS = """
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, Unpack

from paceline import types as t
from paceline.aio import AsyncClient, AsyncRun, BlockingCore, Source, WeightTransport
from paceline.batches.rollout import AsyncOpenBatch, AsyncRollout
from paceline.batches.sessions import AsyncSession, AsyncSessions
from paceline.blocking import Face, entered, finish, iterate
from paceline.calls.caller import STREAM_SECONDS, RetryPolicy
from paceline.shards import Shard
from paceline.transport.channel import Tls
from paceline.v1 import weight_pb2
from paceline.weights.adapters import Adapter
"""
_BATCHES = "from paceline.batches.blocking import OpenBatch, Rollout, Sessions\n"
"""Import of the second file from the first."""
_ENTER = """\
    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:{doc}
        finish(self._core.__aexit__(*raised))
"""
_FACES = "|".join(CORES)


def written() -> dict[Path, str]:
    """Return the text of each file, formatted."""
    # Read as text: while the file is missing or broken, `paceline` cannot be imported.
    classes = {
        each.name: (each, source)
        for path in ("aio.py", "batches/*.py", "calls/*.py")
        for file in sorted(FOLDER.glob(path))
        if str(file.relative_to(FOLDER)) not in FILES
        for source in [file.read_text()]
        for each in ast.parse(source).body
        if isinstance(each, ast.ClassDef)
    }
    return {
        FOLDER / file: _tidy(
            FOLDER / file,
            _HEADS[file]
            + _IMPORTS
            + (_BATCHES if file == "client.py" else "")
            + "\n\n".join(_face(name, classes) for name in names),
        )
        for file, names in FILES.items()
    }


def _tidy(file: Path, text: str) -> str:
    """Return a module formatted, without the imports that it does not use."""
    for command in (["check", "--quiet", "--fix", "--select", "F,I"], ["format"]):
        ruff = [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(file), "-"]
        text = subprocess.run(ruff, input=text, capture_output=True, text=True, check=True).stdout
    return text


def _face(name: str, classes: Classes) -> str:
    """Return the face of a class."""
    base = BASES.get(name)
    above = _sync(base) if base else f"Face[{name}]"
    tree, source = classes[name]
    parts = [f"class {_sync(name)}({above}):\n    {_doc(tree, source)}\n"]
    if base:
        parts.append(f"    _core: {name}\n")
    inherited = {member for member, _ in _members(base, classes)} if base else set()
    found = {member: text for member, text in reversed([*_members(name, classes)])}
    return "\n".join([*parts, *(found[each] for each in reversed(found) if each not in inherited)])


def _members(name: str, classes: Classes) -> Iterator[tuple[str, str]]:
    """Yield the public members of a class and then of its bases, with their faces."""
    tree, source = classes[name]
    for node, after in zip(tree.body, [*tree.body[1:], None], strict=True):
        member = _name_of(node)
        if not member or {member, f"{name}.{member}"} & INTERNAL:
            continue
        if isinstance(node, ast.AnnAssign):
            yield member, _attribute(node, after, source)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (
            text := _method(name, node, source)
        ):
            yield member, text
    for base in tree.bases:
        if ast.unparse(base) in classes:
            yield from _members(ast.unparse(base), classes)


def _name_of(node: ast.stmt) -> str:
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return "" if node.target.id.startswith("_") else node.target.id
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ""
    return "" if re.match("_(?!_)", node.name) else node.name


def _attribute(node: ast.AnnAssign, after: ast.stmt | None, source: str) -> str:
    """Return a property for an attribute, with the docstring after it."""
    name, kind = ast.unparse(node.target), ast.unparse(node.annotation)
    doc = ast.get_source_segment(source, after) if isinstance(after, ast.Expr) else None
    assert doc, f"{name} has no docstring"
    value = f"self._core.{name}"
    if kind == "GatewayCalls":
        kind, value = "Client", f"Client._of({value})  # type: ignore[arg-type]"
    return f"    @property\n    def {name}(self) -> {kind}:\n        {doc}\n        return {value}\n"


def _doc(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef, source: str) -> str:
    """Return the docstring as it is written; empty: there is none."""
    first = node.body[0]
    has_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    return ast.get_source_segment(source, first) or "" if has_doc else ""


def _method(owner: str, node: ast.FunctionDef | ast.AsyncFunctionDef, source: str) -> str:
    """Return the face of a method; empty: it has none."""
    doc = _doc(node, source)
    doc = doc and f"\n        {doc}"
    given = ast.unparse(node.args).replace(" | AsyncIterable[Iterable[t.Group]]", "")
    returned = _sync(ast.unparse(node.returns)) if node.returns else ""
    if node.name == "__init__":
        if owner != "AsyncClient":
            return ""
        return f"    def __init__({given}) -> None:{doc}\n        self._core = BlockingCore({_passed(node.args)})\n"
    if node.name == "__aexit__":
        return _ENTER.format(doc=doc)
    if node.name.startswith("__") and node.name not in ("__aiter__", "__len__"):
        return ""
    name = node.name.replace("__aiter__", "__iter__")
    lines = _body(node, ast.unparse(node.returns) if node.returns else "")
    decorators = [ast.unparse(each) for each in node.decorator_list]
    above = "".join(f"    @{each.removeprefix('async')}\n" for each in decorators)
    body = "".join(f"        {line}\n" for line in lines)
    return f"{above}    def {name}({given}) -> {returned}:{doc}\n{body}"


def _body(node: ast.FunctionDef | ast.AsyncFunctionDef, returned: str) -> list[str]:
    """Return the lines with which a face calls its core."""
    decorators = [ast.unparse(each) for each in node.decorator_list]
    call = f"self._core.{node.name}" + ("" if "property" in decorators else f"({_passed(node.args)})")
    streamed = re.fullmatch(r"Async(?:Iterator|Generator)\[(.*?)(?:, None)?\]", returned)
    if streamed and "asynccontextmanager" in decorators:
        return [f"with entered({call}) as core:", f"    yield {_wrapped(streamed[1], 'core')}"]
    if streamed and re.search(_FACES, streamed[1]):
        return [f"for each in iterate({call}):", f"    yield {_wrapped(streamed[1], 'each')}"]
    if streamed:
        return [f"return iterate({call})"]
    if isinstance(node, ast.AsyncFunctionDef):
        call = f"finish({call})"
    return [f"return {_wrapped(returned, call)}"]


def _wrapped(kind: str, value: str) -> str:
    """Return a value of a type of the asynchronous client as one of the synchronous client."""
    if re.fullmatch(_FACES, kind):
        return f"{_sync(kind)}._of({value})"
    if kind == "list[AsyncSession]":
        # The same session is the same object each time.
        return f"[self._part(Session, each) for each in {value}]"
    if kind == "tuple[AsyncSession, t.Turn]":
        return f"self._part(Session, {value}[0]), {value}[1]"
    if parts := re.fullmatch(rf"list\[({_FACES})\]", kind):
        return f"[{_sync(parts[1])}._of(each) for each in {value}]"
    return value


def _passed(given: ast.arguments) -> str:
    """Return the arguments of a call that passes on all parameters but `self`."""
    passed = [each.arg for each in given.args[1:]]
    passed += [f"{each.arg}={each.arg}" for each in given.kwonlyargs]
    return ", ".join([*passed, *([f"**{given.kwarg.arg}"] if given.kwarg else [])])


def _sync(text: str) -> str:
    return re.sub(r"\bAsync(?=[A-Z])", "", text).replace("Generator[t.Sample, None]", "Iterator[t.Sample]")


def main() -> None:
    """Write the files, or check them."""
    for file, text in written().items():
        if "--check" not in sys.argv:
            file.write_text(text)
        elif not file.exists() or text != file.read_text():
            sys.exit(f"{file.relative_to(FOLDER.parent)} is not current: run scripts/blocking-client")


if __name__ == "__main__":
    main()
