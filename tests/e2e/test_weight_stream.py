"""Weights that are pushed without a shared disk, on a real platform whose instances share no folder either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

import paceline
from paceline import Client, Group, SamplingParams, WeightFolder, WeightStream
from services.local import Platform, PlatformConfig
from tests.e2e.conftest import UNDER_TLS, certificates
from tests.support.zygote import launch

SAMPLING = SamplingParams(max_tokens=40)


@pytest.fixture(scope="module")
def platform(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Platform]:
    config = PlatformConfig(
        model=model,
        instances=2,
        folder=tmp_path_factory.mktemp("platform"),
        shared_weights=False,
        pin=False,
        bubbles=False,
        instance_options=("--dtype=float32", "--max-num-seqs=32", "--kv-cache-memory-bytes=268435456"),
        stop_timeout=60.0,
        tls=certificates(tmp_path_factory.mktemp("certificates")) if UNDER_TLS else None,
        token="the token of the tests" if UNDER_TLS else None,
    )
    with Platform(config, launch=launch) as platform:
        yield platform


def sampled(client: Client, run_id: str) -> dict[paceline.SampleKey, list[int]]:
    """Return the tokens of a step with the weights that are served, which both instances take part in."""
    groups = [Group(f"p{n}", [3 + n, 4, 5], 4) for n in range(8)]
    samples = list(client.run(run_id, seed=4).rollout(0, groups, SAMPLING))
    spans = [span for sample in samples for span in sample.provenance.instance_spans]
    assert {span.instance_id for span in spans} == {"instance-0", "instance-1"}
    return {sample.key: sample.token_ids.tolist() for sample in samples}


def test_what_is_pushed_by_stream_is_what_a_folder_would_be(
    platform: Platform, client: Client, model: Path, tmp_path: Path
) -> None:
    old: dict[str, Any] = load_file(model / "model.safetensors")
    new = {name: tensor * 1.5 for name, tensor in old.items()}
    by_folder = client.run("by-folder", weights=WeightFolder(tmp_path / "weights", model))
    # Several files, so that some are read while others come.
    by_stream = client.run("by-stream", weights=WeightStream(piece_bytes=16384, shard_bytes=100_000))

    by_folder.push_weights(new)
    wanted, checksum = sampled(client, "wanted"), client.versions().policy_checksum
    by_folder.push_weights(old)
    assert sampled(client, "old") != wanted
    finished = by_stream.push_weights(new)
    assert {each.instance_id: each.applied for each in finished.instances} == {
        "instance-0": True,
        "instance-1": True,
    }
    published = client.versions()
    assert (published.policy_version, published.policy_path) == (finished.policy_version, "")
    assert sampled(client, "streamed") == wanted

    places = [
        list((platform.config.adopted / f"instance-{index}").glob(f"v{finished.policy_version:08d}-*"))
        for index in range(2)
    ]
    assert [len(each) for each in places] == [1, 1]
    first, second = ({path.name: path.read_bytes() for path in each.iterdir()} for (each,) in places)
    assert first == second
    assert len(first) > 3
    assert published.policy_checksum != checksum, "the files are others: the tensors are the same"
