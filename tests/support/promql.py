"""PromQL expressions taken apart, and made fit for a test that lasts a minute."""

from __future__ import annotations

import re
from typing import Any

import promql_parser
import yaml

VARIABLES = {
    "$__rate_interval": "20s",
    "$namespace": ".*",
    "$instance": ".*",
    "$run": ".*",
    "$release": ".*",
    "$top": "1000",
}
"""What Grafana puts in, with everything chosen."""
_COMPARING = {"==", "!=", ">", "<", ">=", "<=", "and", "unless"}


def substituted(expression: str) -> str:
    """Return a panel's expression as Grafana would send it."""
    for variable, value in VARIABLES.items():
        expression = expression.replace(variable, value)
    return expression


def parsed(expression: str) -> Any:
    """Return the syntax tree; ValueError when there is none."""
    return promql_parser.parse(expression)


def operands(expression: str) -> list[str]:
    """Operands of a condition's comparisons, however deep: they have values when nothing is wrong, too."""
    return [node.prettify() for node in _operands(parsed(expression))]


def _operands(node: Any) -> list[Any]:
    if not _compares(node):
        return [] if type(node).__name__ in ("NumberLiteral", "StringLiteral") else [node]
    return [part for child in _children(node) for part in _operands(child)]


def _compares(node: Any) -> bool:
    if type(node).__name__ == "BinaryExpr" and str(node.op) in _COMPARING:
        return True
    return any(_compares(child) for child in _children(node))


def _children(node: Any) -> list[Any]:
    named = [getattr(node, name, None) for name in ("lhs", "rhs", "expr")]
    return [child for child in (*named, *(getattr(node, "args", None) or ())) if child is not None]


def vectors(expression: str) -> list[tuple[str, set[str]]]:
    """(metric, labels that it is selected by) of everything that an expression reads."""
    return _vectors(parsed(expression))


def selectors(expression: str) -> set[str]:
    """Names of the metrics that an expression reads."""
    return {name for name, _ in vectors(expression)}


def _vectors(node: Any) -> list[tuple[str, set[str]]]:
    node = getattr(node, "vector_selector", node)
    if type(node).__name__ == "VectorSelector":
        return [(node.name, {matcher.name for matcher in node.matchers.matchers})]
    return [found for child in _children(node) for found in _vectors(child)]


def hastened(rules: str, window: str = "20s", wait: str = "1s") -> dict[str, Any]:
    """Rules with every window, offset and `for` short, so that a test can see them work."""
    content: dict[str, Any] = yaml.safe_load(rules)
    for group in content["groups"]:
        for rule in group["rules"]:
            expression = re.sub(r"\[\w+\]", f"[{window}]", rule["expr"])
            rule["expr"] = re.sub(r"offset \w+", f"offset {wait}", expression)
            if "for" in rule:
                rule["for"] = wait
    return content
