"""Layers that keep old weights are found by vLLM's line in its log."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from services.generation.engine.worker import LOGGER, MESSAGE, StaleLayers, check_layers, stale_layers


class Head(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.zeros(2))


def model(*, tied: bool) -> nn.Module:
    embedding = nn.Embedding(3, 2)
    head = Head(embedding.weight if tied else nn.Parameter(torch.zeros(3, 2)))
    return nn.ModuleList([embedding, head, Table()])


def told(*names: str) -> set[str]:
    logger = logging.getLogger(LOGGER)
    with stale_layers() as stale:
        for name in names:
            logger.warning(MESSAGE, name)
        logger.warning("%s: Something else", "Embedding")
    logger.warning(MESSAGE, "later")
    return stale


@pytest.mark.parametrize("level", [logging.NOTSET, logging.ERROR])
def test_a_layer_with_weights_of_its_own_is_an_error(level: int) -> None:
    logging.getLogger(LOGGER).setLevel(level)
    try:
        stale = told("Head", "Table")
    finally:
        logging.getLogger(LOGGER).setLevel(logging.NOTSET)
    assert stale == {"Head", "Table"}
    with pytest.raises(StaleLayers, match="into Head, and has left the old ones"):
        check_layers(model(tied=False), stale)


def test_a_tied_head_and_a_table_are_none() -> None:
    check_layers(model(tied=True), told("Head", "Table"))
    check_layers(model(tied=False), told())


def test_a_tied_head_is_one_if_its_embedding_is() -> None:
    with pytest.raises(StaleLayers, match="Embedding, Head"):
        check_layers(model(tied=True), told("Head", "Embedding"))
