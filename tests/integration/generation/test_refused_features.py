"""An instance of a model with a recurrent state: it serves, drafts nothing whatever it is told, and says why."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from paceline.internal.v1 import migration_pb2
from paceline.internal.v1 import migration_pb2_grpc as migration_rpc
from tests.integration.generation.conftest import Policy, draft_always
from tests.support.architectures import serve_make
from tests.support.engine_process import EngineProcess
from tests.support.instances import CALL, InstanceProcess, stub_of

FAMILY = "granite4-hybrid"
INFO = "paceline_generation_engine_info"


async def test_a_recurrent_model_is_served_plainly(
    start: Callable[..., InstanceProcess], tmp_path: Path
) -> None:
    folder = tmp_path / FAMILY
    with EngineProcess(serve_make, {FAMILY: folder}) as process:
        process.answer(CALL)
    asked = {"draft_check": True, "speculation": "fixed", "max_branches": 2, "quantized": True}
    with start(folder, "recurrent", **asked) as instance:
        async with stub_of(instance.address) as stub:
            policy = Policy(instance.address, stub)
            refused = dict((await policy.look()).instance.refused_features)
            await draft_always(policy.address, "always")
            fields: dict[str, Any] = {"max_tokens": 60, "ignore_eos": True, "run_id": "always"}
            plain = (await policy.ask(policy.item(1, **fields)))[1]
            again = (await policy.ask(policy.item(1, reference_token_ids=plain.tokens, **fields)))[1]
        async with grpc.aio.insecure_channel(instance.address) as channel:
            migration: Any = migration_rpc.MigrationServiceStub(channel)
            listed = await migration.ListSamples(migration_pb2.ListSamplesRequest(), timeout=CALL)
        metrics = instance.metrics()
    assert refused.keys() == {
        "drafts", "trees", "quantized", "eagle3", "pregeneration", "moves", "prefix_cache",
    }  # fmt: skip
    assert plain.tokens == again.tokens
    assert again.finished is not None
    assert (again.finished.verify_steps, again.finished.decode_steps) == (0, 60)
    # No reallocator chooses it.
    assert listed.free_capacity == 0
    for feature in refused:
        assert metrics[f'paceline_generation_features_refused{{feature="{feature}"}}'] == 1
    assert any(name.startswith(INFO) and refused["drafts"] in name for name in metrics)
