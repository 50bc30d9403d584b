"""vLLM's own code gives the drafts of stock engines on the device's clock."""

from __future__ import annotations

from multiprocessing.connection import Connection
from typing import Any

from bench.device_clock import stock
from bench.device_clock.stock import NgramMethod, ngram_lookup
from tests.support.engine_process import EngineProcess

# The end, 5 6 7, occurs twice before; 6 7 also follows 4.
_PROMPT, _RESPONSE = [1, 2, 5, 6, 7, 8, 9, 10, 11], [4, 6, 7, 3, 5, 6, 7, 20, 21, 5, 6, 7]


def _asked(pipe: Connection[Any, Any]) -> None:
    find = ngram_lookup()
    from vllm.config import SpeculativeConfig

    drafts = [
        NgramMethod(most, lookup, find).propose("", _PROMPT, response)
        for most, lookup, response in ((4, (3, 5), _RESPONSE), (4, (4, 5), _RESPONSE), (2, (2, 5), [4, 6, 7]))
    ]
    names = ("max_tree_depth", "max_cached_requests", "max_spec_factor", "min_token_prob")
    pipe.send((drafts, [getattr(SpeculativeConfig, f"suffix_decoding_{name}") for name in names]))


def test_stock_engines_look_up_n_grams_as_vllm_does_and_have_its_defaults() -> None:
    with EngineProcess(_asked) as process:
        drafts, defaults = process.answer(60)
    assert drafts == [[8, 9, 10, 11], [], [8, 9]]
    assert defaults == [stock.TREE_DEPTH, stock.CACHED_REQUESTS, stock.SPEC_FACTOR, stock.TOKEN_PROBABILITY]
