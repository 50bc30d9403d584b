"""docs/sizing.md: its tables follow from the formulas beside them and from the chart's defaults."""

from __future__ import annotations

import json
import re
from array import array

import numpy as np
import pytest
import yaml

from kernels.suffix_index.records import TEXT_COST
from kernels.suffix_index.suffix_index import MOST_TOKENS
from paceline.columns import TokenBuffer
from paceline.v1 import sample_pb2
from services.contracts.rollout import RolloutKind, StoredRollout
from services.drafts import store
from services.gateway.config import GatewayConfig
from services.gateway.journal.chunks import pack
from services.gateway.scheduler.active_batches import _TOKEN_BYTES
from services.generation.config import GenerationConfig
from services.generation.loop.work_stream import CheckpointRules
from services.platform.config import ServiceConfig
from services.reallocator.config import ReallocatorConfig
from services.reallocator.planning.decision_scope import MOST_LISTED
from tests.support.token_columns import columns
from tests.unit.helm.release import CHART, ROOT

TEXT = (ROOT / "docs/sizing.md").read_text()
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


def _rows(header: str) -> list[list[str]]:
    """Return the rows of the table whose head begins so."""
    lines = TEXT.splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(header))
    block = lines[begin + 2 :]
    end = next(i for i, line in enumerate(block) if not line.startswith("|"))
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in block[:end]]


def _numbers(cells: list[str]) -> list[float]:
    return [float(cell.replace(",", "")) for cell in cells]


def _processor() -> tuple[float, float]:
    """Return the gateway's seconds a sample and a checkpoint."""
    (found,) = re.findall(r"\*\*Processor\*\*: ([\d.]+) ms a sample and ([\d.]+) ms a checkpoint", TEXT)
    return float(found[0]) / 1e3, float(found[1]) / 1e3


def test_a_token_takes_the_bytes_of_the_code() -> None:
    bytes_of = {row[0]: row[1] for row in _rows("| where |")}
    ids, logprobs = range(100_000, 132_768), [-0.5] * 32_768
    plain = TokenBuffer(array("I", ids), array("f", logprobs))
    top = TokenBuffer(plain.token_ids, plain.logprobs, plain.token_ids, plain.logprobs)
    assert len(pack(plain)) / 32_768 == pytest.approx(7, abs=0.01)
    assert (len(pack(top)) - len(pack(plain))) / 32_768 == pytest.approx(7, abs=0.01)
    # As the SDK gets it and as an instance reports it.
    sample = sample_pb2.Sample(tokens=columns(ids, logprobs))
    assert sample.ByteSize() / 32_768 == pytest.approx(7, abs=0.01)
    assert bytes_of["journal in Redis, and each hop of the network"] == "7"
    assert bytes_of["- for each of `top_logprobs`"] == "7"
    share = 21 * 7 * 32_768 / ServiceConfig.model_fields["max_message_bytes"].default
    assert f"`top_logprobs: 20` uses to {share:.0%}".replace("%", " %") in TEXT
    assert bytes_of["gateway, until the sample ends"] == str(_TOKEN_BYTES) == "8"
    assert plain.token_ids.itemsize + plain.logprobs.itemsize == _TOKEN_BYTES


def test_draft_stores_hold_what_rollouts_cost() -> None:
    bytes_of = {row[0]: row[1] for row in _rows("| where |")}

    def cost(tokens: int, logprobs: int) -> int:
        arrays = np.zeros(tokens, np.uint32), np.zeros(logprobs, np.float32)
        return store.cost(StoredRollout("r", "p", 0, 1, RolloutKind.HISTORY, 0, 1, *arrays, True))

    assert bytes_of["draft store, and its rollouts in an instance"] == "8"
    assert cost(32_768, 32_768) / 32_768 == pytest.approx(8, abs=0.05)
    assert cost(32_768, 0) / 32_768 == pytest.approx(4, abs=0.05)
    assert f"bytes a token and {store.ROLLOUT_OVERHEAD} more" in TEXT
    room = 4 << 30
    assert f"{room / 8 / 1e6:.0f} million tokens of long rollouts" in TEXT
    assert 400 * room / cost(400, 400) / 1e6 == pytest.approx(430, abs=10)
    assert "430 million where they have 400" in TEXT.replace("\n", " ")
    cache = GenerationConfig.model_fields["draft_cache_bytes"].default
    assert f"(`draft_cache_bytes`, {cache >> 20} MiB) are {cache // 8 // 10**6} million tokens" in TEXT


def test_steps_take_what_their_samples_and_tokens_say() -> None:
    of_sample, of_checkpoint = _processor()
    rules = CheckpointRules()
    every = min(rules.tokens, 50 * rules.seconds)
    assert f"comes after {rules.tokens} tokens or {rules.seconds:.0f} seconds" in TEXT
    for row in _rows("| samples of a step |"):
        samples, tokens, checkpoints, seconds, memory, redis, most = _numbers(row)
        assert checkpoints == pytest.approx(tokens / every, abs=0.5)
        assert seconds == pytest.approx(samples * (of_sample + tokens / every * of_checkpoint), abs=0.05)
        assert memory == pytest.approx(samples * tokens * 8 / 1e9, abs=0.005)
        assert redis == pytest.approx(samples * tokens * 7 / 1e9, abs=0.005)
        assert most == pytest.approx(samples * tokens * 7 / 1e9 / 0.7, abs=0.005)


def test_the_measured_figures_are_those_of_the_benchmark() -> None:
    table = json.loads((ROOT / "bench/results/fleet.json").read_text())["tables"]["fleets"]
    (row,) = [row for row in map(_numbers, table["rows"]) if row[0] == 1000]
    found = dict(zip(table["columns"], row, strict=True))
    assert f"about {found['gateway, ms of processor time a sample']:.1f} ms a sample" in TEXT
    assert f"{found['Redis, s a thousand samples']:.2f} s for a thousand samples" in TEXT
    assert f"{found['peak memory, MiB']:.0f} MiB" in TEXT


def test_an_index_takes_what_its_texts_say() -> None:
    assert f"{TEXT_COST} tokens more than it has" in TEXT
    most = GenerationConfig.model_fields["draft_index_tokens"].default
    assert f"up to `draft_index_tokens` ({most // 10**6}\nmillion)" in TEXT
    assert f"At most {MOST_TOKENS // 10**6} million tokens" in TEXT
    fits = dict[float, bool]()
    for row in _rows("| samples of an instance |"):
        samples, tokens, alone, both, memory = _numbers(row)
        needed = samples * (tokens + TEXT_COST)
        assert alone == pytest.approx(needed / 1e6, abs=0.05)
        assert both == pytest.approx(2 * needed / 1e6, abs=0.05)
        assert memory == pytest.approx(2 * needed * 100 / 1e9, abs=0.005)
        fits[tokens] = needed <= most
    assert (fits[8000], fits[16_384]) == (True, False)
    assert "holds 256 samples of 8,000 tokens, and not of 16,384" in TEXT


def test_moves_take_what_the_kv_says() -> None:
    fields = ReallocatorConfig.model_fields
    at_once, seconds = fields["moves_at_once"].default, fields["move_timeout_seconds"].default
    assert f"`moves_at_once` ({at_once})" in TEXT
    assert f"`move_timeout_seconds` ({seconds:.0f})" in TEXT
    assert f"at most {MOST_LISTED} instances" in TEXT
    shapes = {row[0]: _numbers(row[2:5]) for row in _rows("| model | parameters |")}
    for row in _rows("| model | KV of 8,000 tokens, GB |"):
        layers, heads, dimension = shapes[row[0]]
        token, (short, long, *longest) = 2 * layers * heads * dimension * 2, _numbers(row[1:])
        assert short == pytest.approx(8000 * token / 1e9, abs=0.005)
        assert long == pytest.approx(32_768 * token / 1e9, abs=0.005)
        assert longest == [int(rate / 8 * seconds / at_once / token) for rate in (10e9, 100e9)]


def test_the_example_follows_from_the_rules() -> None:
    result = {row[0]: row[2] for row in _rows("| what | sum |")}
    of_sample, of_checkpoint = _processor()
    in_kv = _numbers(next(row for row in _rows("| model | parameters |") if row[0] == "Qwen3-8B")[1:])[6]
    running, samples, tokens = int(in_kv / 4000), 256_000, 256_000 * 8000
    seconds = 256 / running * 8000 / 50
    work = samples * (of_sample + 32 * of_checkpoint)
    assert result["KV"] == f"{running} samples run at once"
    assert result["time of the step"] == f"{seconds:.0f} s"
    assert result["gateway, processor"] == f"{work:.0f} s, {work / seconds:.2f} of a core"
    assert result["gateway, tokens in memory"] == f"{running * 1000 * 4000 * 8 / 1e9:.1f} GB"
    assert result["Redis"] == f"{tokens * 7 / 1e9:.1f} GB, `maxMemory` {tokens * 7 / 0.7 / 1e9:.1f} GB"
    assert result["network, each hop"] == f"{tokens * 7 / seconds / 1e9:.2f} GB/s"
    index = 2 * 256 * (8000 + TEXT_COST)
    assert index > GenerationConfig.model_fields["draft_index_tokens"].default
    assert result["suffix index, with a rollout generated ahead"] == f"{index / 1e6:.1f} million tokens"
    stored = samples * (8000 * 8 + store.ROLLOUT_OVERHEAD)
    assert result["draft stores, one earlier rollout each"] == f"{stored / 1e9:.1f} GB"
    assert result["a move at 10 Gbit/s"] == f"{8000 * 2 * 36 * 8 * 128 * 2 / 1.25e9:.2f} s"


def test_models_take_what_their_shapes_say() -> None:
    for row in _rows("| model | parameters |"):
        name, *cells = row
        parameters, layers, heads, dimension, weights, kv, tokens, gpus = _numbers(cells)
        assert weights == pytest.approx(parameters * 2 / 1e9, abs=0.05), name
        bytes_per_token = 2 * layers * heads * dimension * 2
        assert kv == pytest.approx(bytes_per_token / 1e3, abs=0.05)
        assert tokens == int((0.9 * 80e9 * gpus - parameters * 2) / bytes_per_token)


def test_updates_take_what_versions_and_instances_say() -> None:
    for row in _rows("| model | version, GB |"):
        version, instances, read, rate, each = _numbers(row[1:])
        assert read == pytest.approx(version * instances, abs=0.05)
        assert rate == pytest.approx(read / 60, abs=0.05)
        assert each == pytest.approx(version / 300, abs=0.005)


def test_defaults_that_are_named_are_those_of_chart_and_gateway() -> None:
    fields = GatewayConfig.model_fields
    for name in ("stage_timeout_seconds", "apply_timeout_seconds"):
        assert f"`{name}` ({fields[name].default:.0f})" in TEXT
    assert fields["max_token_bytes"].default == 2 << 30
    results = fields["max_result_bytes"].default
    assert f"`max_result_bytes` ({results >> 20} MiB, {results / 7e6:.0f} million tokens)" in TEXT
    assert f"`learner_feed_bytes` ({fields['learner_feed_bytes'].default >> 20} MiB)" in TEXT
    assert f"after {fields['journal_tokens'].default:,} tokens (`journal_tokens`)" in TEXT
    assert VALUES["gateway"]["resources"]["limits"]["memory"] == "4Gi"
    embedded = VALUES["redis"]["embedded"]
    assert (embedded["maxMemory"], embedded["size"]) == ("4gb", "20Gi")
    defaults = VALUES["generation"]["defaults"]
    assert (defaults["resources"]["limits"]["memory"], defaults["cacheSize"]) == ("64Gi", "20Gi")
    assert VALUES["drafts"]["config"]["budget_bytes"] == 4 << 30
