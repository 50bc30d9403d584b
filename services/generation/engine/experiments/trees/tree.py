"""Draft trees: draft tokens of a sample, some of which are alternatives to others. Pure.

A tree is a list of tokens, each with the index of its parent, which comes earlier in the list; ROOT stands for the
sample's last token. The list begins with the primary chain, in which each token is the child of its predecessor. A
chain is a tree with no other tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROOT = -1


@dataclass(frozen=True, slots=True)
class DraftTree(Sequence[int]):
    """Draft tokens [k] of a sample, and the index of each parent [k], ROOT for a child of the sample's last token.

    It is the sequence of its tokens. ValueError if a parent does not come before its child, or two children of a
    parent are the same token.
    """

    tokens: Sequence[int]
    parents: Sequence[int]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.parents):
            raise ValueError(f"parents: {len(self.parents)} for {len(self.tokens)} draft tokens")
        seen: set[tuple[int, int]] = set()
        for place, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if not ROOT <= parent < place:
                raise ValueError(
                    f"parents: draft token {place} has the parent {parent}, which is not before it"
                )
            if (parent, token) in seen:
                raise ValueError(f"tokens: two children of draft token {parent} are {token}")
            seen.add((parent, token))

    def __len__(self) -> int:
        return len(self.tokens)

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens)

    def __getitem__(self, index: Any) -> Any:
        return self.tokens[index]

    @property
    def depth(self) -> int:
        """Length of the longest path, the most tokens that can be accepted."""
        return max(depths_of(self.parents), default=0)


def chain_length(parents: Sequence[int]) -> int:
    """Return the length of the primary chain."""
    return next((place for place, parent in enumerate(parents) if parent != place - 1), len(parents))


def depths_of(parents: Sequence[int]) -> list[int]:
    """Return the depth of each token of a tree, 1 for the children of the root."""
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent == ROOT else depths[parent] + 1)
    return depths


def forked(
    drafts: Mapping[str, Sequence[int]], parents: Mapping[str, Sequence[int]]
) -> dict[str, Sequence[int]]:
    """Return drafts by sample, of which the ones with parents are trees."""
    return {**drafts, **{name: DraftTree(drafts[name], own) for name, own in parents.items()}}


def tree_with_fork(right: Sequence[int], wrong: Sequence[int]) -> DraftTree:
    """Return a tree of a wrong token and, as a branch, two right ones; for the check before serving."""
    return DraftTree([wrong[0], *right[:2]], [ROOT, ROOT, 1])
