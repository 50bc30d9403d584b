"""What is said of a model before it is loaded is what its engine finds."""

from __future__ import annotations

from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from services.generation.engine.outlook import Outlook
from tests.support.architectures import make
from tests.support.engine_process import EngineProcess
from tests.support.models import tiny_model

_SECONDS = 120


def serve_outlook(pipe: Connection[Any, Any], family: str, folder: Path, dtype: str) -> None:
    """Tell of a model in the process of an engine; it is made where there is none."""
    from services.generation.engine.outlook import outlook

    pipe.send(outlook(str(folder if folder.is_dir() else make(family, folder)), dtype))


def outlook_of(family: str, folder: Path, dtype: str = "float32") -> Outlook:
    with EngineProcess(serve_outlook, family, folder, dtype) as process:
        told: Outlook = process.answer(_SECONDS)
    return told


def test_what_the_kernels_for_cpu_refuse_is_known_before(tmp_path: Path) -> None:
    told = outlook_of("qwen3-next", tmp_path / "next")
    assert told.refusal == "CPU GDN attention requires BF16."
    odd = tiny_model(tmp_path / "odd", "llama", head_dim=40)
    assert "head_dim=40" in outlook_of("", odd).refusal


def test_what_a_model_goes_without_is_known_before(tmp_path: Path) -> None:
    told = outlook_of("granite4-hybrid", tmp_path / "granite")
    assert (told.refusal, told.unknown, told.dtype) == ("", "", "float32")
    assert told.kinds == ("FullAttentionSpec", "MambaSpec")
    assert told.refused.keys() == {"trees", "quantized", "eagle3", "moves", "prefix_cache", "keep_kv"}


def test_a_model_that_vllm_does_not_know_is_refused_with_its_message(tmp_path: Path) -> None:
    unknown = tiny_model(
        tmp_path / "unknown", "llama", architectures=["NobodysForCausalLM"], model_type="nobodys"
    )
    told = outlook_of("", unknown)
    assert "nobodys" in told.refusal.lower()
    assert told.refused == {}


@pytest.mark.soak
def test_a_dtype_that_the_kernels_take_is_not_refused(tmp_path: Path) -> None:
    assert outlook_of("qwen3-next", tmp_path / "next", "bfloat16").refusal == ""


@pytest.mark.parametrize("head_size", [16, 72, 288])
@pytest.mark.soak
def test_head_sizes_that_are_refused_before_fail_when_they_are_served(head_size: int, tmp_path: Path) -> None:
    from tests.integration.exactness.test_models import why_not_served
    from tests.support.exactness_matrix import options_of

    model = tiny_model(tmp_path / "odd", "llama", head_dim=head_size)
    refusal = outlook_of("", model).refusal
    assert refusal
    assert why_not_served(options_of("llama", model)) == refusal
