"""Random draft trees, right in some places and wrong in others."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from services.generation.engine.experiments.trees.tree import ROOT, DraftTree

_RIGHT = 0.7


def random_tree(random: Random, truth: Sequence[int], room: int, vocab_size: int) -> DraftTree:
    """Return a tree of up to `room` tokens: a primary chain, and branches that fork anywhere, from branches, too.

    Args:
        random: where it comes from.
        truth: the tokens that the sample will have.
        room: most tokens.
        vocab_size: tokens there are.
    """
    tokens, parents = list[int](), list[int]()
    children: dict[int, set[int]] = {ROOT: set()}
    # Nodes at which the truth is followed, with the number of its tokens until there.
    right = {ROOT: 0}

    def grow(parent: int, length: int) -> None:
        for _ in range(min(length, room - len(tokens))):
            depth = right.get(parent)
            wanted = truth[depth] if depth is not None and depth < len(truth) else None
            if wanted is None or wanted in children[parent] or random.random() > _RIGHT:
                others = [
                    each for each in range(vocab_size) if each not in children[parent] and each != wanted
                ]
                if not others:
                    return
                token = random.choice(others)
            else:
                token = wanted
            node = len(tokens)
            if token == wanted and depth is not None:
                right[node] = depth + 1
            children[parent].add(token)
            children[node] = set()
            tokens.append(token)
            parents.append(parent)
            parent = node

    grow(ROOT, random.randrange(5))
    for _ in range(random.randrange(1, 5)):
        grow(random.randrange(ROOT, len(tokens)), random.randrange(1, 5))
    return DraftTree(tokens, parents)


def walk(tree: DraftTree, truth: Sequence[int]) -> list[int]:
    """Return the nodes of a tree that are accepted where these tokens are drawn, one after another."""
    found, at = list[int](), ROOT
    for token in truth:
        here = [i for i, parent in enumerate(tree.parents) if parent == at and tree.tokens[i] == token]
        if not here:
            break
        at = here[0]
        found.append(at)
    return found
