"""Instances of models that do not allow everything: they use what is allowed, and say what is not and why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.internal.v1 import migration_pb2
from paceline.internal.v1 import migration_pb2_grpc as migration_rpc
from tests.integration.generation.conftest import Policy, draft_always
from tests.support.architectures import serve_make
from tests.support.engine_process import EngineProcess
from tests.support.instances import CALL, InstanceProcess, stub_of

INFO = "paceline_generation_engine_info"
STATEFUL, LATENT = "granite4-hybrid", "deepseek-mla"
NEVER = {"trees", "quantized", "eagle3", "moves", "keep_kv"}
REFUSED = {STATEFUL: NEVER | {"prefix_cache"}, LATENT: NEVER | {"drafts", "pregeneration", "resuming"}}


@pytest.mark.parametrize("family", REFUSED)
async def test_an_instance_drafts_what_its_model_allows(
    start: Callable[..., InstanceProcess], tmp_path: Path, family: str
) -> None:
    folder = tmp_path / family
    with EngineProcess(serve_make, {family: folder}) as process:
        process.answer(CALL)
    asked = {"draft_check": True, "speculation": "fixed", "max_branches": 2, "quantized": True}
    with start(folder, family, **asked) as instance:
        async with stub_of(instance.address) as stub:
            policy = Policy(instance.address, stub)
            refused = dict((await policy.look()).instance.refused_features)
            await draft_always(policy.address, "always")
            fields: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "run_id": "always"}
            plain = (await policy.ask(policy.item(1, **fields)))[1]
            again = (await policy.ask(policy.item(1, reference_token_ids=plain.tokens, **fields)))[1]
            wrong = [token + (place % 7 == 6) for place, token in enumerate(plain.tokens)]
            edited = (await policy.ask(policy.item(1, reference_token_ids=wrong, **fields)))[1]
        async with grpc.aio.insecure_channel(instance.address) as channel:
            migration: Any = migration_rpc.MigrationServiceStub(channel)
            listed = await migration.ListSamples(migration_pb2.ListSamplesRequest(), timeout=CALL)
        metrics = instance.metrics()
    assert refused.keys() == REFUSED[family]
    assert plain.tokens == again.tokens == edited.tokens
    for found in (again, edited):
        assert found.finished is not None
        plainly = (found.finished.verify_steps, found.finished.decode_steps) == (0, 60)
        assert plainly == ("drafts" in refused)
    # No reallocator chooses it.
    assert listed.free_capacity == 0
    for feature, reason in refused.items():
        assert metrics[f'paceline_generation_features_refused{{feature="{feature}"}}'] == 1
        assert any(name.startswith(INFO) and reason in name for name in metrics)
