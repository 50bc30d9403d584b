"""docs/sizing.md: its tables follow from the formulas beside them and from the chart's defaults."""

from __future__ import annotations

import re

import pytest
import yaml

from services.gateway.config import GatewayConfig
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


def test_steps_take_what_their_samples_and_tokens_say() -> None:
    for row in _rows("| samples of a step |"):
        samples, tokens, seconds, memory, redis, most = _numbers(row)
        assert seconds == pytest.approx(samples * 1.1e-3, abs=0.05)
        assert memory == pytest.approx(samples * tokens * 8 / 1e9, abs=0.005)
        assert redis == pytest.approx(samples * tokens * 7 / 1e9, abs=0.005)
        assert most == pytest.approx(samples * tokens * 7 / 1e9 / 0.7, abs=0.005)


def test_the_measured_figures_are_those_of_the_benchmark() -> None:
    performance = (ROOT / "docs/performance.md").read_text()
    (row,) = re.findall(r"^\| 1,000 \| (.*) \|$", performance, re.MULTILINE)
    samples, milliseconds, _, redis, _, _, memory, _ = row.split(" | ")
    assert samples == "100,000"
    assert f"about {float(milliseconds):.1f} ms a sample" in TEXT
    assert f"{redis} s for a thousand samples" in TEXT
    assert f"{memory} MiB" in TEXT


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
    assert VALUES["gateway"]["resources"]["limits"]["memory"] == "4Gi"
    embedded = VALUES["redis"]["embedded"]
    assert (embedded["maxMemory"], embedded["size"]) == ("4gb", "20Gi")
    defaults = VALUES["generation"]["defaults"]
    assert (defaults["resources"]["limits"]["memory"], defaults["cacheSize"]) == ("64Gi", "20Gi")
    assert VALUES["drafts"]["config"]["budget_bytes"] == 4 << 30
