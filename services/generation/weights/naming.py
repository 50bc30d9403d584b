"""Names of an update's tensors beside those of the model: what is missing, what came instead, and why. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

_SAMPLE = 64
"""Names that are looked at: a mistake of this kind is in all of them, or in all of a layer."""


def naming_hint(missing: Collection[str], surplus: Collection[str]) -> str:
    """Return what the names that came have in common that those of the model do not; "" if nothing is found.

    Found are a prefix too many or too few, and a part too many within the names, as a wrapper of a module adds it.
    """
    if not missing or not surplus:
        return ""
    wanted, came = frozenset(missing), frozenset(surplus)
    found = Counter[str]()
    examples: dict[str, str] = {}
    for name in sorted(came)[:_SAMPLE]:
        for part, original in _without_a_part(name.split(".")):
            if original in wanted:
                text = f"have {part!r} in them, which the model's have not"
                found[text] += 1
                examples.setdefault(text, f"{name} for {original}")
    for name in sorted(wanted)[:_SAMPLE]:
        for part, original in _without_a_part(name.split(".")):
            if original in came:
                text = f"lack {part!r}, which the model's have"
                found[text] += 1
                examples.setdefault(text, f"{original} for {name}")
    if not found:
        return ""
    text = found.most_common(1)[0][0]
    return f"{len(came)} names came that the model has not; they {text}: {examples[text]}"


def shown(missing: Collection[str], surplus: Collection[str], most: int) -> tuple[list[str], list[str]]:
    """Return those of the missing and of the surplus names that an error has room for, some of both."""
    room = max(most // 2, most - len(surplus))
    first = sorted(missing)[:room]
    return first, sorted(surplus)[: most - len(first)]


def _without_a_part(parts: Sequence[str]) -> list[tuple[str, str]]:
    """Return names that are left when the first parts, or one within, are taken away, and what was taken."""
    prefixes = [(".".join(parts[:end]) + ".", ".".join(parts[end:])) for end in range(1, len(parts))]
    within = [
        (parts[place] + ".", ".".join([*parts[:place], *parts[place + 1 :]]))
        for place in range(1, len(parts) - 1)
    ]
    return prefixes + within
