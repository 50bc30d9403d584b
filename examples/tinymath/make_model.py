"""Make the tiny model: supervised training from scratch on worked solutions, a few minutes on two cores.

    python -m examples.tinymath.make_model --out examples/tinymath/model

Training stops long before the model is perfect: reinforcement learning then improves tasks in which the model
succeeds only sometimes.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from random import Random

import torch
from torch.nn.functional import cross_entropy
from torch.optim.lr_scheduler import LambdaLR
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from examples.tinymath import tokenizer
from examples.tinymath.tasks import draw_problem, trace

Row = tuple[list[int], int]
"""Token ids of a prompt with its solution, and the length of the prompt."""

CHUNK = 2048
"""Rows that are drawn together, sorted by length and divided into batches, so that there is little padding."""
MATRIX_LR, OTHER_LR = 2e-2, 3e-3
"""Peak learning rates."""
SCHEDULE = 2800
"""Length of the learning rate schedule in steps; training stops before its end (`--steps`)."""


def new_model(seed: int) -> Qwen3ForCausalLM:
    """Return a Qwen3 of 1.2 million parameters; heads of 32, the smallest that vLLM's CPU attention takes."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=tokenizer.SIZE,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1536,
        tie_word_embeddings=True,
        # Wider than the usual 0.02: a model this narrow learns about twice as fast with it.
        initializer_range=0.06,
        pad_token_id=tokenizer.PAD_ID,
        bos_token_id=tokenizer.BOS_ID,
        eos_token_id=tokenizer.EOS_ID,
    )
    model = Qwen3ForCausalLM(config)
    for name, weight in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            # Sharper attention from the start helps to learn copying digits, which comes first.
            torch.nn.init.constant_(weight, 1.5)
    return model


def new_optimizers(model: Qwen3ForCausalLM, rate: float = 1.0) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices, which needs half the steps there, and AdamW for embedding and norms.

    `rate` is the share of the peak learning rates.
    """
    matrices = [
        weight for name, weight in model.named_parameters() if weight.ndim == 2 and "embed" not in name
    ]
    others = [weight for name, weight in model.named_parameters() if weight.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=MATRIX_LR * rate, weight_decay=0.01, adjust_lr_fn="original"),
        torch.optim.AdamW(others, lr=OTHER_LR * rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def draw_row(rng: Random) -> Row:
    """Draw one training row."""
    problem = draw_problem(rng)
    prompt = tokenizer.prompt_ids(problem.question)
    return prompt + tokenizer.encode(trace(problem, rng)), len(prompt)


def batches(seed: int, tokens: int, draw: Callable[[Random], Row] = draw_row) -> Iterator[list[Row]]:
    """Yield endless batches of rows of similar length, each with about `tokens` tokens including padding."""
    rng = Random(seed)
    while True:
        rows = sorted((draw(rng) for _ in range(CHUNK)), key=lambda row: len(row[0]))
        cut: list[list[Row]] = [[]]
        for row in rows:
            if (len(cut[-1]) + 1) * len(row[0]) > tokens and cut[-1]:
                cut.append([])
            cut[-1].append(row)
        rng.shuffle(cut)
        yield from cut


def response_loss(model: Qwen3ForCausalLM, rows: list[Row]) -> torch.Tensor:
    """Return the mean cross entropy in nats for each response token.

    Padding is on the right, where causal attention of other tokens never sees it, so no mask is needed.
    """
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([ids + [tokenizer.PAD_ID] * (width - len(ids)) for ids, _ in rows])
    place = torch.arange(1, width)
    prompt = torch.tensor([[length] for _, length in rows])
    targets = ids[:, 1:].masked_fill((place < prompt) | (ids[:, 1:] == tokenizer.PAD_ID), -100)
    # A processor without bfloat16 instructions emulates them, which is slower than float32.
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported()):
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
    return cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def schedule(step: int) -> float:
    """Return the share of the peak learning rate: 50 steps of warm-up, then a cosine down to a twentieth."""
    if step < 50:
        return (step + 1) / 50
    return 0.525 + 0.475 * math.cos(math.pi * (step - 50) / (SCHEDULE - 50))


def train(
    model: Qwen3ForCausalLM,
    rows_of_steps: Iterable[list[Row]],
    steps: int,
    *,
    rate: float = 1.0,
    snapshots: Path | None = None,
) -> Qwen3ForCausalLM:
    """Train a model for `steps` steps at the share `rate` of the peak learning rates, and print the loss."""
    model.train()
    optimizers = new_optimizers(model, rate)
    schedules = [LambdaLR(optimizer, schedule) for optimizer in optimizers]
    began, losses = time.monotonic(), []
    for step, rows in zip(range(steps), rows_of_steps, strict=False):
        loss = response_loss(model, rows)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer, scheduled in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            scheduled.step()
        losses.append(loss.item())
        if (step + 1) % 100 == 0:
            mean = sum(losses[-100:]) / 100
            print(f"step {step + 1:5d}  loss {mean:.4f}  {time.monotonic() - began:5.0f} s", flush=True)
        if snapshots is not None and (step + 1) % 200 == 0:
            save(model, snapshots / str(step + 1))
    return model


def save(model: Qwen3ForCausalLM, folder: Path) -> None:
    """Write a complete model folder: weights (float32), configs and tokenizer."""
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        pad_token_id=tokenizer.PAD_ID,
        bos_token_id=tokenizer.BOS_ID,
        eos_token_id=tokenizer.EOS_ID,
    )
    model.save_pretrained(folder)
    tokenizer.save(folder)


def main() -> None:
    """Read the options, train, and save the model."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "model")
    options.add_argument("--steps", type=int, default=1200)
    options.add_argument("--tokens", type=int, default=2048, help="tokens of a step, including padding")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--snapshots", type=Path, help="folder for snapshots of the model every 200 steps")
    given = options.parse_args()
    rows = batches(given.seed, given.tokens)
    save(train(new_model(given.seed), rows, given.steps, snapshots=given.snapshots), given.out)


if __name__ == "__main__":
    main()
