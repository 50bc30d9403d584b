"""What a chat template expects of its messages, read from its syntax tree. Pure.

vLLM's server has the same rules for whether a template goes through the parts of a content, or expects a string.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from jinja2 import TemplateError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


@dataclass(frozen=True, slots=True)
class TemplateTraits:
    """What a chat template expects."""

    openai_content: bool = False
    """Whether contents are lists of parts; otherwise they are strings."""
    developer: bool = False
    """Whether there are messages of role `developer`; otherwise they are system messages."""
    variables: frozenset[str] = frozenset()
    """Variables that it reads."""


class _Generation(Extension):
    """The tag that marks what an assistant wrote; it has no effect on the text."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the statements between the tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


_ENVIRONMENT = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
)


def traits_of(template: str) -> TemplateTraits:
    """Return what a template expects. ValueError if it is none."""
    try:
        tree = _ENVIRONMENT.parse(template)
        variables = meta.find_undeclared_variables(tree)
    except TemplateError as error:
        raise ValueError(f"is no template: {error}") from error
    developer = any(f"{quote}developer{quote}" in template for quote in "\"'")
    return TemplateTraits(_goes_through_parts(tree), developer, frozenset(variables))


def _goes_through_parts(tree: nodes.Template) -> bool:
    """Return True if a loop goes through the content of a message."""
    conversations = _aliases(tree, "messages")
    if conversations is None:
        return False
    messages = set()
    for loop in tree.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in conversations):
            if not isinstance(loop.target, nodes.Name):
                return False
            messages.add(loop.target.name)
    through_arguments = dict(_argument_loops(tree, messages))
    for loop in tree.find_all(nodes.For):
        given = loop.iter
        names = through_arguments.get(id(loop), {"content"})
        if any(_reads(given, name, "content") for name in messages) or (
            isinstance(given, nodes.Name) and given.name in names
        ):
            return isinstance(loop.target, nodes.Name)
    return False


def _aliases(tree: nodes.Template, name: str) -> set[str] | None:
    """Return the names under which a variable, or a part of it, is known; None: one is no plain name."""
    found, waiting = {name}, [name]
    while waiting:
        known = waiting.pop(0)
        for assignment in tree.find_all(nodes.Assign):
            if not _reads(assignment.node, known):
                continue
            if not isinstance(assignment.target, nodes.Name):
                return None
            if assignment.target.name not in found:
                found.add(assignment.target.name)
                waiting.append(assignment.target.name)
    return found


def _argument_loops(tree: nodes.Template, messages: Iterable[str]) -> Iterator[tuple[int, set[str]]]:
    """Yield each loop in a macro with the macro's arguments that are called with the content of a message."""
    for macro in tree.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        contents = set()
        for call in tree.find_all(nodes.Call):
            if isinstance(call.node, nodes.Name) and call.node.name == macro.name:
                given = [
                    *zip(names, call.args, strict=False),
                    *((each.key, each.value) for each in call.kwargs),
                ]
                contents |= {
                    name
                    for name, value in given
                    if name in names and any(_reads(value, message, "content") for message in messages)
                }
        for loop in macro.find_all(nodes.For):
            yield id(loop), contents


def _reads(node: nodes.Node | None, name: str, attribute: str = "") -> bool:
    """Return True if an expression is a variable, or an attribute of it: as it is, filtered, tested or sliced."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if attribute:
        if isinstance(node, nodes.Getattr):
            if node.attr != attribute:
                return False
        elif not (
            isinstance(node, nodes.Getitem)
            and isinstance(node.arg, nodes.Const)
            and node.arg.value == attribute
        ):
            return False
        node = node.node
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name
