"""Fenced blocks of the documents: which are commands, and which of them say why they are not run.

A comment of HTML before a block says that it is not run, and why:

    <!-- not run: it starts vLLM -->

A comment anywhere in a page says so of every block with a command of a program:

    <!-- not run with kubectl, helm: there is no cluster here -->
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import dedent

COMMANDS = {"sh", "python"}
"""Languages of blocks that are run."""
DATA = {"yaml", "toml", "json", "text", "mermaid"}
_MARK = "<!-- not run: "
_FENCE = re.compile(
    rf"(?:{_MARK}((?:(?!-->)[\s\S])+?) -->\s*\n)?^( *)```(.*)\n((?:.*\n)*?)\2```$", re.MULTILINE
)
_PROGRAMS = re.compile(r"<!-- not run with ([\w\-, ./]+): ([\s\S]+?) -->")
_CALLED = re.compile(r"(?:^ *|\| *|&& *|do )([\w./-]+)", re.MULTILINE)
_FILE = re.compile(r"# ([\w.-]+\.\w+)\n")
_BETWEEN_COMMANDS = frozenset("|;&")


class DocumentError(Exception):
    """A page has a block that is neither run nor said not to be, or says so of no block."""


@dataclass(frozen=True)
class Block:
    """A block of a page."""

    line: int
    language: str
    text: str
    reason: str
    """Why it is not run; empty if it is."""

    @property
    def file(self) -> str:
        """File that its first line names, as `# first.py` does: a later block uses it."""
        found = _FILE.match(self.text)
        return found[1] if found else ""


def read(page: str) -> list[Block]:
    """Return the blocks of a page, in its order.

    Raises:
        DocumentError: a block has no known language, or a reason belongs to no block.
    """
    programs = {
        name.strip(): reason for names, reason in _PROGRAMS.findall(page) for name in names.split(",")
    }
    blocks, unused, marks = list[Block](), set(programs), 0
    for found in _FENCE.finditer(page):
        reason, _, language, text = found.groups()
        line = page.count("\n", 0, found.start(2)) + 1
        if language not in COMMANDS | DATA:
            raise DocumentError(f"line {line}: language {language!r} is none of {sorted(COMMANDS | DATA)}")
        called = programs.keys() & set(_CALLED.findall(text)) if language == "sh" else set[str]()
        unused -= called
        marks += language in COMMANDS and reason is not None
        blocks.append(
            Block(line, language, dedent(text), reason or " ".join(programs[name] for name in sorted(called)))
        )
    if marks != page.count(_MARK):
        raise DocumentError(f"{page.count(_MARK)} comments `not run` stand before {marks} blocks of commands")
    if unused:
        raise DocumentError(f"`not run with`: no block calls {sorted(unused)}")
    return blocks


def commands(text: str) -> Iterator[list[str]]:
    """Return the commands of a block of the shell as words, one after the other, without redirections."""
    for line in re.sub(r"\\\n\s*", "", text).replace("|\n", "| ").splitlines():
        reader = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
        reader.whitespace_split = True
        words = list(reader)
        while words:
            end = next((at for at, word in enumerate(words) if set(word) <= _BETWEEN_COMMANDS), len(words))
            command = words[:end]
            yield command[: next((at for at, word in enumerate(command) if set(word) <= set("<>")), end)]
            words = words[end + 1 :]
