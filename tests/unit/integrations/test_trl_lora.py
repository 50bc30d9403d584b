"""Every option of PEFT's LoraConfig is merged right or refused by name, on tied and untied models.

Right: the model that loads the merged tensors by name gives the log-probabilities of the live one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import fields
from functools import cache
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.integrations import UnsupportedTrainerError
from paceline.integrations.trl import lora
from paceline.integrations.trl.lora import MergedWeights
from paceline.weights.adapters import BY_FLEET, BY_TRAINER, _plain, refused
from services.contracts.errors import InvalidArgument
from services.generation.weights.adapters import plan_merge

peft = pytest.importorskip("peft", reason="peft is not installed (extra trl)")
# Of PEFT, which warns of what the table is about.
pytestmark = pytest.mark.filterwarnings("ignore")

lora_rows = import_module("tests.support.lora_rows")
ROWS = lora_rows.ROWS

IDS = torch.randint(0, 48, (2, 12), generator=torch.Generator().manual_seed(1))


@cache
def plain(tied: bool) -> Any:
    return fresh(tied)


def fresh(tied: bool) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen2Config(
        vocab_size=48, num_hidden_layers=2, tie_word_embeddings=tied, initializer_range=0.3, **sizes
    )
    return Qwen2ForCausalLM(config).eval()


def adapted(base: Any, options: Mapping[str, Any]) -> Any:
    """A model with an adapter as after some steps: each number that is trained is another than at the start."""
    config = peft.LoraConfig(**{"target_modules": ["q_proj", "v_proj"], "r": 4, **options})
    if config.init_lora_weights == "corda":
        import_module("peft.tuners.lora.corda").preprocess_corda(
            base, config, run_model=lambda: base(IDS[:1])
        )
    model = peft.get_peft_model(base, config).eval()
    noise = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or "lora_" in name:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=noise)
    return model


def log_probabilities(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits.log_softmax(-1)
    return found


def served(base: Any, tensors: Mapping[str, Any]) -> torch.Tensor:
    """Log-probabilities of the model once it has loaded all tensors by name, and nothing is left of its own."""
    for parameter in base.parameters():
        parameter.data.fill_(float("nan"))
    assert not base.load_state_dict(dict(tensors), strict=False).unexpected_keys
    return log_probabilities(base)


def check_right(model: Any, base: Any, before: torch.Tensor) -> None:
    """What is pushed of the model is its policy, which is not that of before; and the model stays as it is."""
    kept = {name: parameter.clone() for name, parameter in model.named_parameters()}
    live = log_probabilities(model)
    assert (live - before).abs().max() > 1e-3
    torch.testing.assert_close(served(base, MergedWeights(model)), live, atol=1e-4, rtol=0)
    assert all(parameter.equal(kept[name]) for name, parameter in model.named_parameters())
    assert log_probabilities(model).equal(live)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_the_merged_policy_is_the_live_one_or_the_option_is_named(row: Any, tied: bool) -> None:
    model = adapted(fresh(tied), row.options)
    told = row.tied if tied else row.untied
    if told:
        with pytest.raises(UnsupportedTrainerError, match=told):
            MergedWeights(model)
    else:
        check_right(model, fresh(tied), log_probabilities(plain(tied)))


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_an_instance_merges_what_the_trainer_does_or_names_the_option(row: Any) -> None:
    model = adapted(fresh(tied=False), row.options)
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(
            unwrap_model=lambda model: model, get_state_dict=lambda _: model.state_dict()
        ),
        model=model,
        model_wrapped=model,
        is_fsdp_enabled=False,
        is_deepspeed_enabled=False,
    )
    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    tensors = {name.replace(".default.", "."): each for name, each in state.items()}
    found = {name: tuple(each.shape) for name, each in tensors.items()}
    config = json.loads(json.dumps(model.peft_config["default"].to_dict(), default=_plain))
    base = plain(tied=False).state_dict()
    shapes = {name: tuple(each.shape) for name, each in base.items()}
    if row.by_fleet:
        with pytest.raises(InvalidArgument) as refusal:
            plan_merge(config, found, shapes)
        assert row.by_fleet in str(refusal.value)
        with pytest.raises(UnsupportedTrainerError):
            lora.adapter_of(trainer)
        return
    plan = plan_merge(config, found, shapes)
    merged = {name: base[name] + plan.scale * tensors[b] @ tensors[a] for name, (b, a) in plan.pairs.items()}
    torch.testing.assert_close(served(fresh(tied=False), {**base, **merged}), log_probabilities(model))
    adapter, below = lora.adapter_of(trainer)
    assert {name.replace(".default.", ".") for name in adapter.tensors} == set(tensors)
    assert all(below[name].equal(base[name]) for name in base)


def test_the_table_has_every_option_of_the_installed_peft() -> None:
    options = {field.name for field in fields(peft.LoraConfig)}
    covered = {"target_modules"}.union(lora_rows.UNMADE, *(row.options for row in ROWS.values()))
    assert options - covered == set()
    assert options == set(BY_FLEET) == set(BY_TRAINER)


@pytest.mark.parametrize("allowed", [BY_FLEET, BY_TRAINER], ids=["fleet", "trainer"])
def test_an_unknown_option_is_refused_unless_it_asks_for_nothing(allowed: Any) -> None:
    for name, value in lora_rows.UNMADE.items():
        assert refused({name: value}, allowed) == {name: value}
    assert refused({"use_newer": True, "newer": {"a": 1}, "off": False, "none": None, "no": []}, allowed) == {
        "use_newer": True,
        "newer": {"a": 1},
    }
    assert refused({"peft_type": "LOHA"}, allowed) == {"peft_type": "LOHA"}


def others() -> Iterator[tuple[Any, Mapping[str, Any]]]:
    """Models whose layers are not all linear ones with their output first."""
    from transformers import (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        GPT2Config,
        GPT2LMHeadModel,
        Qwen3MoeConfig,
        Qwen3MoeForCausalLM,
    )

    sizes = {"vocab_size": 48, "initializer_range": 0.3, "hidden_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 24}
    gpt2 = GPT2Config(vocab_size=48, n_embd=16, n_layer=1, n_head=2, initializer_range=0.3)
    yield GPT2LMHeadModel(gpt2), {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}
    moe = Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8)
    yield (
        Qwen3MoeForCausalLM(moe),
        {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
    )
    # Its embeddings are scaled.
    gemma = Gemma3ForCausalLM(Gemma3TextConfig(**sizes, **heads, tie_word_embeddings=True))
    yield gemma, {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}


@pytest.mark.parametrize("place", range(3), ids=["GPT-2", "MoE", "Gemma 3"])
def test_other_layers_are_merged_right(place: int) -> None:
    torch.manual_seed(0)
    base, options = list(others())[place]
    kept = base.eval().state_dict()
    before = log_probabilities(base)
    model = adapted(deepcopy(base), options)
    assert set(MergedWeights(model)) <= set(kept)
    check_right(model, base, before)


def test_layers_that_are_not_known_and_several_adapters_are_refused() -> None:
    model = adapted(fresh(tied=False), {"target_modules": ["q_proj"]})
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    layer.base_layer.weight = torch.nn.Parameter(torch.zeros(8, 1, dtype=torch.uint8), requires_grad=False)
    with pytest.raises(
        UnsupportedTrainerError, match=r"q_proj, which has weight in torch\.uint8.*quantization"
    ):
        MergedWeights(model)
    layer.__class__ = type("Linear4bit", (type(layer),), {})
    with pytest.raises(UnsupportedTrainerError, match=r"q_proj is a .*Linear4bit of PEFT.*target_modules"):
        MergedWeights(model)
    model = adapted(fresh(tied=False), {})
    model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(UnsupportedTrainerError, match="2 adapters are active, default, other"):
        MergedWeights(model)


def test_adapters_that_are_not_trained_have_no_part_in_what_is_pushed() -> None:
    """As with TRL, which keeps a copy of a pretrained adapter as its reference."""
    model = adapted(fresh(tied=False), {"modules_to_save": ["norm"]})
    model.add_adapter("ref", peft.LoraConfig(target_modules=["k_proj"], modules_to_save=["norm"]))
    assert set(MergedWeights(model)) == set(plain(tied=False).state_dict())
    check_right(model, fresh(tied=False), log_probabilities(plain(tied=False)))


def test_what_is_trained_beside_an_adapter_is_not_pushed_without_a_word() -> None:
    model = adapted(fresh(tied=False), {})
    model.get_base_model().model.norm.weight.requires_grad_(True)
    trainer = SimpleNamespace(accelerator=SimpleNamespace(unwrap_model=lambda model: model), model=model)
    with pytest.raises(UnsupportedTrainerError, match=r"norm\.weight is trained, too"):
        lora.adapter_of(trainer)
