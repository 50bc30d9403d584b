"""Growing the tiny model: the function stays, and every new weight can learn."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from random import Random  # noqa: E402

from examples.tinymath.grow_model import LONG_TRACE, GrownSize, draw_long_row, grow  # noqa: E402
from examples.tinymath.make_model import new_model, response_loss  # noqa: E402
from examples.tinymath.options import MODEL  # noqa: E402

SMALL = GrownSize(hidden=160, intermediate=416, layers=8, heads=6, key_value_heads=3)


def logits(model: transformers.Qwen3ForCausalLM) -> torch.Tensor:
    """Return the logits of random tokens."""
    ids = torch.randint(0, 64, (3, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return model.eval()(input_ids=ids).logits


@pytest.mark.parametrize(("size", "error"), [(GrownSize(), 1e-5), (SMALL, 2e-5)])
def test_a_grown_model_has_the_logits_of_the_old_one(size: GrownSize, error: float) -> None:
    """Four times the width is exact in float32; other widths round every weight that they scale.

    The error is relative to the largest logit, because processors sum in different orders.
    """
    old = transformers.Qwen3ForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    made = grow(old, size)
    before = logits(old)
    assert (logits(made) - before).abs().max() <= error * before.abs().max()
    assert made.config.num_hidden_layers == size.layers == len(made.model.layers)


def test_it_has_between_10_and_20_million_parameters() -> None:
    made = grow(new_model(0), GrownSize())
    assert 10e6 <= sum(weight.numel() for weight in made.parameters()) <= 20e6


def test_the_same_seed_gives_the_same_weights() -> None:
    old = new_model(0)
    one, same, other = (grow(old, SMALL, seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not all(torch.equal(one[name], other[name]) for name in one)


def test_what_begins_at_zero_learns() -> None:
    """Every row and column that writes into the residual stream changes within two steps."""
    made = grow(new_model(0), SMALL).train()
    began = {name: weight.clone() for name, weight in made.state_dict().items()}
    optimizer = torch.optim.SGD(made.parameters(), lr=0.1)
    ids = [int(each) for each in torch.randint(3, 64, (40,), generator=torch.Generator().manual_seed(0))]
    for _ in range(2):
        response_loss(made, [(ids, 4)]).backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, weight in made.state_dict().items():
        if "o_proj" in name or "down_proj" in name:
            changed = weight != began[name]
            assert changed.any(0).all(), name
            assert changed.any(1).all(), name


@pytest.mark.parametrize(
    ("size", "what"),
    [
        (GrownSize(hidden=64), "hidden would shrink"),
        (GrownSize(layers=4), "layers would shrink"),
        (GrownSize(heads=16, key_value_heads=2), "share its keys"),
    ],
)
def test_what_would_change_the_function_is_refused(size: GrownSize, what: str) -> None:
    with pytest.raises(ValueError, match=what):
        grow(new_model(0), size)


def test_it_is_tuned_on_long_responses() -> None:
    ids, prompt = draw_long_row(Random(0))
    assert len(ids) - prompt >= LONG_TRACE
