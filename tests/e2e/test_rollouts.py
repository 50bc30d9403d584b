"""Steps through the SDK on a real platform: exactly once, reproducible, and bad input harms nobody."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import paceline
from examples.minimal_trainer import train
from paceline import Client, Group, Sample, SampleRequest, SamplingParams, WeightFolder
from services.local import Platform
from tests.e2e.conftest import UNDER_TLS, VOCAB

SAMPLING = SamplingParams(max_tokens=60)


def groups(count: int = 4, samples: int = 4) -> list[Group]:
    return [Group(f"p{n}", [3 + n, 4, 5], samples) for n in range(count)]


def tokens(samples: Sequence[Sample]) -> dict[paceline.SampleKey, list[int]]:
    return {sample.key: sample.token_ids.tolist() for sample in samples}


def test_a_step_gives_every_sample_once(client: Client) -> None:
    rollout = client.run("once", seed=1).rollout(0, groups(), SAMPLING)
    samples = list(rollout)
    wanted = Counter(paceline.SampleKey(f"p{n}", slot) for n in range(4) for slot in range(4))
    assert Counter(sample.key for sample in samples) == wanted
    for sample in samples:
        assert len(sample.logprobs) == len(sample.token_ids) > 0
        assert np.isfinite(sample.logprobs).all()
        assert (sample.logprobs <= 0).all()
        assert sample.version_spans[-1].end == len(sample.token_ids)
        assert sample.provenance.lossless
        ended_by_length = len(sample.token_ids) == 60 and sample.token_ids[-1] != 2
        expected = paceline.FinishReason.LENGTH if ended_by_length else paceline.FinishReason.STOP
        assert sample.finish_reason is expected


def as_flags(platform: Platform) -> list[str]:
    """Where the gateway is, and what it asks for."""
    tls, flags = platform.config.tls, ["--address", platform.gateway_address]
    if tls is not None:
        files = {"ca": tls.ca_file, "cert": tls.cert_file, "key": tls.key_file}
        flags += [f"--{name}-file={path}" for name, path in files.items()]
    return [*flags, f"--token={platform.config.token}"] if platform.config.token else flags


def test_status_shows_the_fleet(platform: Platform, client: Client) -> None:
    version = client.versions().policy_version
    done = subprocess.run(
        [sys.executable, "-m", "paceline", "status", *as_flags(platform)],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "200"},
    )
    assert done.returncode == 0, done.stderr
    assert "instance-0" in done.stdout
    assert "serving" in done.stdout
    assert f"Policy version {version}" in done.stdout


def test_both_instances_take_part_and_say_when(client: Client) -> None:
    samples = list(client.run("both", seed=1).rollout(0, groups(8), SAMPLING))
    spans = [span for sample in samples for span in sample.provenance.instance_spans]
    assert {span.instance_id for span in spans} == {"instance-0", "instance-1"}
    assert all(span.begin <= span.end for span in spans)


def test_the_same_step_gives_the_same_tokens_wherever_it_runs(client: Client) -> None:
    first = list(client.run("same-a", seed=7).rollout(3, groups(8), SAMPLING))
    # Other company, other order, so another placement.
    extra = [Group(f"x{n}", [9, 9, 9 + n], 3) for n in range(5)]
    again = list(client.run("same-b", seed=7).rollout(3, [*extra, *reversed(groups(8))], SAMPLING))
    places = [
        {s.key: s.provenance.instance_spans[0].instance_id for s in samples} for samples in (first, again)
    ]
    assert tokens(first).items() <= tokens(again).items()
    assert any(places[0][key] != places[1][key] for key in places[0]), "both ran in the same places"


def test_groups_that_are_added_while_others_run_have_the_same_tokens(client: Client) -> None:
    whole = tokens(list(client.run("submitted", seed=7).rollout(3, groups(8), SAMPLING)))
    with client.run("opened", seed=7).open_batch(3, SAMPLING) as batch:
        batch.add(groups(8)[:4])
        found, left = list[Sample](), groups(8)[4:]
        for group in batch.by_group():
            assert len(group) == 4
            found += group
            if left:
                batch.add([left.pop()])
            if len(found) == len(batch):
                batch.close()
    assert tokens(found) == whole


def test_seed_step_and_slot_make_the_tokens(client: Client) -> None:
    base = tokens(list(client.run("s0", seed=7).rollout(0, groups(1), SAMPLING)))
    other_seed = tokens(list(client.run("s1", seed=8).rollout(0, groups(1), SAMPLING)))
    other_step = tokens(list(client.run("s2", seed=7).rollout(1, groups(1), SAMPLING)))
    assert len({tuple(ids) for ids in base.values()}) == 4
    assert base != other_seed
    assert base != other_step


@pytest.mark.parametrize("level", ["COUPLED_HISTORY", "REJECTION"])
def test_other_exactness_levels_are_stamped_on_their_samples(client: Client, level: str) -> None:
    exactness = paceline.Exactness(paceline.ExactnessLevel[level])
    run = client.run(f"level-{level}", seed=7)
    first, second = (list(run.rollout(step, groups(2), SAMPLING, exactness=exactness)) for step in (0, 1))
    assert {s.provenance.exactness.level for s in (*first, *second)} == {exactness.level}
    assert all(sample.provenance.lossless for sample in (*first, *second))
    # Noise without the step: the same weights give the same rollouts in every epoch.
    assert (tokens(first) == tokens(second)) == (level == "COUPLED_HISTORY")


def test_a_batch_can_be_read_again_from_any_cursor(client: Client) -> None:
    rollout = client.run("again", seed=1).rollout(0, groups(), SAMPLING)
    events = list(client.stream("again", rollout.batch.batch_id))
    for cursor in (0, events[7].cursor, events[-1].cursor):
        later = [event for event in events if event.cursor > cursor]
        again = list(client.stream("again", rollout.batch.batch_id, cursor))
        assert [event.sample.key for event in again] == [event.sample.key for event in later]


def test_generate_gives_what_a_batch_gives(client: Client) -> None:
    (batched,) = client.run("gen", seed=5).rollout(2, [Group("p0", [3, 4, 5], 1)], SAMPLING)
    *deltas, sample = client.generate(
        SampleRequest("gen", "p0", [3, 4, 5], slot=0, step=2, sampling=SAMPLING, run_seed=5)
    )
    assert isinstance(sample, Sample)
    assert sample.token_ids.tolist() == batched.token_ids.tolist()
    assert [token for delta in deltas for token in delta.token_ids.tolist()] == sample.token_ids.tolist()


def test_a_sample_goes_on_from_its_prefix_as_if_it_had_not_stopped(client: Client) -> None:
    request = SampleRequest("prefix", "p0", [3, 4, 5], sampling=SAMPLING, run_seed=6)
    *_, whole = client.generate(request)
    cut = len(whole.token_ids) // 2
    prefixed = SampleRequest(
        "prefix", "p0", [3, 4, 5], prefix_token_ids=whole.token_ids[:cut], sampling=SAMPLING, run_seed=6
    )
    new = [t for event in client.generate(prefixed) if not isinstance(event, Sample) for t in event.token_ids]
    assert cut > 0
    assert new == whole.token_ids[cut:].tolist()


def test_cancelled_samples_are_delivered_with_what_they_have(client: Client) -> None:
    endless = SamplingParams(max_tokens=900, ignore_eos=True)
    rollout = client.run("cancel", seed=1).rollout(0, groups(8, 8), endless)
    cancelled = rollout.cancel(keep_partial=True)
    samples = list(rollout)
    assert len(samples) == 64
    assert cancelled > 0
    assert sum(sample.status is paceline.SampleStatus.ABORTED for sample in samples) == cancelled


BAD = {
    "token out of the vocabulary": ([Group("p", [3, VOCAB], 1)], SAMPLING),
    "empty prompt": ([Group("p", [], 1)], SAMPLING),
    "no samples": ([Group("p", [3], 0)], SAMPLING),
    "no groups": ([], SAMPLING),
    "prompt twice": ([Group("p", [3], 1), Group("p", [4], 1)], SAMPLING),
    "prompt too long": ([Group("p", [3] * 2000, 1)], SAMPLING),
    "negative temperature": ([Group("p", [3], 1)], SamplingParams(temperature=-1.0)),
    "temperature not a number": ([Group("p", [3], 1)], SamplingParams(temperature=math.nan)),
    "top_p zero": ([Group("p", [3], 1)], SamplingParams(top_p=0.0)),
    "no tokens": ([Group("p", [3], 1)], SamplingParams(max_tokens=0)),
    "stop token out of the vocabulary": ([Group("p", [3], 1)], SamplingParams(stop_token_ids=(999,))),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_refused_and_explained(client: Client, case: str) -> None:
    bad_groups, sampling = BAD[case]
    with pytest.raises(paceline.InvalidArgumentError) as caught:
        client.run("bad", seed=1).rollout(0, bad_groups, sampling)
    assert caught.value.violations
    assert all(violation.field and violation.description for violation in caught.value.violations)


def test_bad_input_harms_no_other_batch(client: Client) -> None:
    calm = tokens(list(client.run("calm", seed=2).rollout(0, groups(), SAMPLING)))
    rollout = client.run("beside", seed=2).rollout(0, groups(), SAMPLING)
    with pytest.raises(paceline.InvalidArgumentError):
        client.run("beside", seed=2).rollout(1, BAD["token out of the vocabulary"][0], SAMPLING)
    assert tokens(list(rollout)) == calm


def test_another_version_than_the_current_is_refused(client: Client) -> None:
    current = client.versions().policy_version
    with pytest.raises(paceline.FailedPreconditionError) as caught:
        client.run("version", seed=1).rollout(0, groups(), SAMPLING, policy_version=current + 1)
    assert str(current) in str(caught.value)


def test_an_unknown_batch_is_not_found(client: Client) -> None:
    with pytest.raises(paceline.NotFoundError):
        list(client.stream("nobody", "nothing"))


def test_pushed_weights_change_the_tokens_and_the_version(
    client: Client, model: Path, tmp_path: Path
) -> None:
    state: dict[str, Any] = load_file(model / "model.safetensors")
    run = client.run("push", seed=3, weights=WeightFolder(tmp_path / "weights", model))
    before = list(run.rollout(0, groups(), SAMPLING))
    version = client.versions().policy_version
    finished = run.push_weights({name: tensor * 1.5 for name, tensor in state.items()})
    assert finished.policy_version == client.versions().policy_version == version + 1
    assert {update.policy_version for update in finished.instances} == {version + 1}
    # The same seeds under another name, so that only the weights differ.
    after = list(client.run("pushed", seed=3).rollout(0, groups(), SAMPLING))
    assert {span.policy_version for sample in after for span in sample.version_spans} == {version + 1}
    assert tokens(after) != tokens(before)
    run.push_weights(state)
    back = list(client.run("back", seed=3).rollout(0, groups(), SAMPLING))
    assert tokens(back) == tokens(before), "nothing of the other weights may remain"


def test_an_adapter_is_a_version_and_so_is_what_has_changed(
    client: Client, model: Path, tmp_path: Path
) -> None:
    state: dict[str, Any] = load_file(model / "model.safetensors")
    weights = WeightFolder(tmp_path / "weights", model, deltas=True)
    run = client.run("adapter", seed=4, weights=weights)
    run.push_weights(state)
    before = tokens(list(run.rollout(0, groups(), SAMPLING)))
    name = next(name for name in state if name.endswith("layers.0.self_attn.q_proj.weight"))
    b, a = (
        np.full((len(state[name]), 1), 0.5, np.float32),
        np.full((1, state[name].shape[1]), 0.5, np.float32),
    )
    stem = f"base_model.model.{name.removesuffix('.weight')}"
    adapter = paceline.Adapter(
        {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}, {"r": 1, "lora_alpha": 1}
    )
    version = run.push_adapter(adapter).policy_version
    served = tokens(list(client.run("adapted", seed=4).rollout(0, groups(), SAMPLING)))
    assert served != before
    assert run.push_weights(state).policy_version == version + 1
    # 0.25, of which sums and products are exact.
    run.push_weights(state | {name: state[name] + 0.25})
    assert (tmp_path / "weights" / f"delta-{version + 2:08d}").is_dir()
    assert tokens(list(client.run("merged", seed=4).rollout(0, groups(), SAMPLING))) == served
    run.push_weights(state)


def _push(client: Client, folder: WeightFolder, state: dict[str, Any], checksum: str | None) -> None:
    """Pushes weights, under another checksum than theirs when one is given."""
    if checksum is None:
        client.run("bad", weights=folder).push_weights(state)
        return
    version = client.versions().policy_version + 1
    update = client.start_update("bad", version)
    try:
        client.update_weights(update.update_id, folder.write(version, state), checksum)
    finally:
        client.abort_update(update.update_id)


@pytest.mark.parametrize("fault", ["nan", "shape", "missing", "checksum"])
def test_bad_weights_are_refused_and_the_old_ones_serve_on(
    client: Client, model: Path, tmp_path: Path, fault: str
) -> None:
    state: dict[str, Any] = load_file(model / "model.safetensors")
    name = "model.norm.weight"
    version = client.versions().policy_version
    before = tokens(list(client.run(f"good-{fault}", seed=4).rollout(0, groups(), SAMPLING)))
    if fault == "nan":
        state[name] = state[name] * math.nan
    elif fault == "shape":
        state[name] = state[name][:-1]
    elif fault == "missing":
        del state[name]
    folder = WeightFolder(tmp_path / "weights", model)
    with pytest.raises((paceline.DataLossError, paceline.InvalidArgumentError)):
        _push(client, folder, state, checksum="sha256:" + "0" * 64 if fault == "checksum" else None)
    assert client.versions().policy_version == version
    assert client.versions().update_id == ""
    after = tokens(list(client.run(f"still-good-{fault}", seed=4).rollout(0, groups(), SAMPLING)))
    assert after == before


@pytest.mark.skipif(UNDER_TLS, reason="the example speaks to a platform without TLS")
def test_the_minimal_trainer_takes_a_step(platform: Platform, client: Client, model: Path) -> None:
    version = client.versions().policy_version
    means = train(platform.gateway_address, model, steps=1)
    assert len(means) == 1
    assert client.versions().policy_version == version + 1


def test_the_fleet_is_as_it_was_started(platform: Platform, client: Client) -> None:
    found = {instance.instance_id: instance for instance in client.instances()}
    assert sorted(found) == ["instance-0", "instance-1"]
    for child in platform.instances:
        instance = found[child.spec.name]
        assert instance.state is paceline.InstanceState.SERVING
        assert child.ready is not None
        assert instance.address == child.ready.address
        assert instance.vocab_size == VOCAB
