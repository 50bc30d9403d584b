"""The suffix index beside arctic-inference's suffix cache, in one run: `python -m bench.drafts_index`.

Speed and memory: a million cached tokens over a thousand prompts, made-up texts of repeated phrases; 64 samples
of 8 of the prompts run, and each step appends 3 tokens to each and asks for 8. Acceptance: rollouts of the
tinymath model at temperature 1, half of each prompt's cached and the others replayed: what matches of an offer is
accepted, and the sample goes on behind it and one more token.

The other side is measured if `arctic_inference.suffix_decoding` can be imported (PYTHONPATH), else its figures are
null. In acceptance it is given what suits it best: prompts in front of the responses or not, limits or none.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any, Protocol

import numpy as np
import psutil
from numpy.typing import NDArray

from bench.report import show, write
from kernels.suffix_index import SuffixIndex, warm_up

Tokens = NDArray[np.int32]
MODEL = Path("examples/tinymath/model")
PROMPTS, ROLLOUTS, LENGTH, PROMPT_LENGTH = 1000, 4, 250, 100
VOCABULARY, PHRASES = 32_000, 5000
RUNNING, RUNNING_PROMPTS, APPENDED, WINDOW = 64, 8, 3, 8
ARCTIC_DEPTHS = (24, 64)
"""Depths of arctic's tree: the one that vLLM sets, and its own."""
ARCTIC_LIMITS = ((1.0, 0.1), (1000.0, 0.0))
"""Arctic's max_spec_factor and min_token_prob: its own, and none."""
RATIOS = (
    "batch_step_speedup_vs_arctic",
    "insert_speedup_vs_arctic",
    "insert_speedup_vs_arctic_bare_tree",
    "bytes_per_token_ratio_vs_arctic",
    "acceptance_ratio_vs_arctic",
)
"""Ours to the better of arctic's; of memory, ours to the smaller."""


@dataclass(frozen=True, slots=True)
class RunningGroup:
    """A prompt and rollouts of it."""

    prompt: Tokens
    rollouts: list[Tokens]


Sample = tuple[int, int, RunningGroup]
"""A rollout that runs: prompt, rollout, group."""


class Side(Protocol):
    """A suffix index under test."""

    def insert(self, prompt: int, rollout: int, group: RunningGroup) -> None:
        """Cache a rollout of a group."""

    def start(self, samples: Sequence[Sample]) -> None:
        """Track these samples from now on, and no others."""

    def keep(self, which: Sequence[int]) -> None:
        """Step only these of the samples started."""

    def step(self, new: Sequence[Tokens], window: int) -> list[list[int]]:
        """Append to each sample that is stepped; what is offered for each."""


class Paceline:
    """Ours."""

    def __init__(self, max_tokens: int) -> None:
        self.index = SuffixIndex(max_tokens=max_tokens)
        self._handles: dict[tuple[int, int], int] = {}
        self._order = np.empty(0, np.int64)

    def insert(self, prompt: int, rollout: int, group: RunningGroup) -> None:
        """Cache a rollout of a group."""
        self.index.put_prompt(prompt, group.prompt)
        self.index.insert(prompt, rollout, 0, group.rollouts[rollout])

    def start(self, samples: Sequence[Sample]) -> None:
        """Track these samples from now on, and no others."""
        for handle in self._handles.values():
            self.index.close(handle)
        for prompt, _, group in samples:
            self.index.put_prompt(prompt, group.prompt)
        self._handles = {
            (prompt, rollout): self.index.open(prompt, rollout, 0) for prompt, rollout, _ in samples
        }
        self.keep(range(len(samples)))

    def keep(self, which: Sequence[int]) -> None:
        """Step only these of the samples started."""
        self._order = np.array(list(self._handles.values()), np.int64)[list(which)]

    def step(self, new: Sequence[Tokens], window: int) -> list[list[int]]:
        """Append to each sample that is stepped; what is offered for each."""
        cu = np.zeros(len(new) + 1, np.int64)
        np.cumsum([len(tokens) for tokens in new], out=cu[1:])
        offers = self.index.step(self._order, np.concatenate(new), cu, window)
        return [
            row[:count] for row, count in zip(offers.tokens.tolist(), offers.counts.tolist(), strict=True)
        ]


class Text:
    """A sample's prompt and response in one buffer, so that its end can be handed out without copying."""

    def __init__(self, prompt: Tokens) -> None:
        self._buffer = np.empty(2 * len(prompt) + 4096, np.int32)
        self._length = 0
        self.append(prompt)

    def append(self, tokens: Tokens) -> None:
        """Add to the end."""
        end = self._length + len(tokens)
        self._buffer[self._length : end] = tokens
        self._length = end

    def last(self, most: int) -> Tokens:
        """Return the last tokens."""
        return self._buffer[max(0, self._length - most) : self._length]


class Arctic:
    """arctic-inference's. Its tree of responses knows no prompts; `prefixed`: they stand in front of responses."""

    def __init__(self, depth: int, limits: tuple[float, float], prefixed: bool) -> None:
        from arctic_inference.suffix_decoding import SuffixDecodingCache  # type: ignore[import-not-found]

        self.cache = SuffixDecodingCache(max_tree_depth=depth)
        self._depth, (self._factor, self._least), self._prefixed = depth, limits, prefixed
        self._texts: dict[tuple[int, int], Text] = {}
        self._order: list[tuple[int, int]] = []

    def insert(self, prompt: int, rollout: int, group: RunningGroup) -> None:
        """Cache a rollout of a group."""
        name = (prompt, rollout)
        self.cache.start_request(name, group.prompt)
        text = group.rollouts[rollout]
        self.cache.add_active_response(name, np.concatenate([group.prompt, text]) if self._prefixed else text)
        self.cache.stop_request(name)

    def start(self, samples: Sequence[Sample]) -> None:
        """Track these samples from now on, and no others."""
        for name in self._texts:
            self.cache.stop_request(name)
        self._texts = {}
        for prompt, rollout, group in samples:
            self.cache.start_request((prompt, rollout), group.prompt)
            if self._prefixed:
                self.cache.add_active_response((prompt, rollout), group.prompt)
            self._texts[prompt, rollout] = Text(group.prompt)
        self.keep(range(len(samples)))

    def keep(self, which: Sequence[int]) -> None:
        """Step only these of the samples started."""
        names = list(self._texts)
        self._order = [names[i] for i in which]

    def step(self, new: Sequence[Tokens], window: int) -> list[list[int]]:
        """Append to each sample that is stepped; what is offered for each."""
        for name, tokens in zip(self._order, new, strict=True):
            if len(tokens):
                self.cache.add_active_response(name, tokens)
                self._texts[name].append(tokens)
        return [
            self.cache.speculate(
                name,
                self._texts[name].last(self._depth),
                window,
                max_spec_factor=self._factor,
                min_token_prob=self._least,
            ).token_ids
            for name in self._order
        ]


def arctic_missing() -> str | None:
    """Why arctic's figures are null; None if it can be imported."""
    try:
        import_module("arctic_inference.suffix_decoding")
    except ImportError as error:
        return f"arctic_inference.suffix_decoding cannot be imported: {error}"
    return None


def made_up_groups(prompts: int = PROMPTS, seed: int = 0) -> list[RunningGroup]:
    """Texts that repeat phrases: some that all prompts share, some of the prompt, in an order that it prefers.

    The first prompts have further rollouts for the samples that run.
    """
    rng = np.random.default_rng(seed)
    likely = np.cumsum(1 / np.arange(1, VOCABULARY + 1))

    def words(count: int) -> Tokens:
        return np.searchsorted(likely, rng.random(count) * likely[-1]).astype(np.int32)

    shared = [words(int(rng.integers(2, 12))) for _ in range(PHRASES)]

    def rollout(own: list[Tokens], following: NDArray[np.int64]) -> Tokens:
        parts, length, at = [], 0, int(rng.integers(len(own)))
        while length < LENGTH:
            # One phrase of seven is new.
            parts.append(words(int(rng.integers(1, 6))) if rng.random() < 0.15 else own[at])
            length += len(parts[-1])
            at = int(following[at, rng.choice(3, p=(0.6, 0.3, 0.1))])
        return np.concatenate(parts)[:LENGTH]

    groups = []
    for prompt in range(prompts):
        count = ROLLOUTS + (RUNNING // RUNNING_PROMPTS if prompt < RUNNING_PROMPTS else 0)
        own = [shared[i] for i in rng.integers(0, PHRASES, 30)]
        own += [words(int(rng.integers(2, 12))) for _ in range(30)]
        following = rng.integers(0, len(own), (len(own), 3))
        groups.append(RunningGroup(words(PROMPT_LENGTH), [rollout(own, following) for _ in range(count)]))
    return groups


def tinymath_groups(prompts: int = 24, rollouts: int = 16, seed: int = 0) -> list[RunningGroup]:
    """Rollouts of the tinymath model at temperature 1, of problems as in training, made here on the CPU."""
    import torch
    from transformers import AutoModelForCausalLM

    from examples.tinymath import tokenizer
    from examples.tinymath.tasks import MAX_TRACE, PRACTICE, make_problems

    # So small a model gains nothing from more threads, and they would wait for each other on a busy machine.
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    groups = []
    for problem in make_problems(seed + 1, prompts, PRACTICE):
        ids = tokenizer.prompt_ids(problem.question)
        batch = torch.tensor([ids] * rollouts)
        with torch.no_grad():
            texts = model.generate(
                batch,
                attention_mask=torch.ones_like(batch),
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=MAX_TRACE,
                eos_token_id=tokenizer.EOS_ID,
                pad_token_id=tokenizer.PAD_ID,
            )
        responses = [until_end(text[len(ids) :], tokenizer.EOS_ID) for text in texts.numpy()]
        groups.append(RunningGroup(np.array(ids, np.int32), responses))
    return groups


def until_end(tokens: NDArray[Any], end: int) -> Tokens:
    """Return a response with its end token, without what pads it."""
    ends = np.flatnonzero(tokens == end)
    return tokens[: ends[0] + 1 if len(ends) else len(tokens)].astype(np.int32)


def fill(side: Side, groups: Sequence[RunningGroup], rollouts: int) -> float:
    """Cache the first rollouts of each group; seconds."""
    start = time.perf_counter()
    for prompt, group in enumerate(groups):
        for rollout in range(rollouts):
            side.insert(prompt, rollout, group)
    return time.perf_counter() - start


def replay(side: Side, groups: Sequence[RunningGroup], cached: int, window: int) -> dict[str, float]:
    """Cache the first rollouts of each group, then replay the others, some prompts at a time, in step."""
    fill(side, groups, cached)
    emitted = steps = offering = offered = accepted = 0
    for first in range(0, len(groups), RUNNING_PROMPTS):
        samples = [
            (prompt, rollout, groups[prompt])
            for prompt in range(first, min(first + RUNNING_PROMPTS, len(groups)))
            for rollout in range(cached, len(groups[prompt].rollouts))
        ]
        side.start(samples)
        texts = [group.rollouts[rollout] for _, rollout, group in samples]
        place = [0] * len(samples)
        live = list(range(len(samples)))
        new = [np.empty(0, np.int32)] * len(samples)
        while live:
            side.keep(live)
            offers = side.step([new[i] for i in live], window)
            for i, offer in zip(live, offers, strict=True):
                kept = matching(offer, texts[i][place[i] :])
                new[i] = texts[i][place[i] : place[i] + kept + 1]
                place[i] += len(new[i])
                emitted, steps, accepted = emitted + len(new[i]), steps + 1, accepted + kept
                offering, offered = offering + bool(offer), offered + len(offer)
            live = [i for i in live if place[i] < len(texts[i])]
    return {
        "tokens_per_step": emitted / steps,
        "accepted_per_step": accepted / steps,
        "accepted_per_offer": accepted / max(1, offering),
        "acceptance_rate": accepted / max(1, offered),
        "offered_per_step": offered / steps,
    }


def matching(offer: Sequence[int], text: Tokens) -> int:
    """Return how many tokens of a proposal come true."""
    for i, (guess, token) in enumerate(zip(offer, text.tolist(), strict=False)):
        if guess != token:
            return i
    return min(len(offer), len(text))


def step_seconds(sides: Sequence[Side], groups: Sequence[RunningGroup]) -> list[float]:
    """Median seconds of a step of all running samples, for each side; they take turns."""
    each = RUNNING // RUNNING_PROMPTS
    samples = [
        (prompt, ROLLOUTS + i, groups[prompt]) for prompt in range(RUNNING_PROMPTS) for i in range(each)
    ]
    for side in sides:
        side.start(samples)
    took: list[list[float]] = [[] for _ in sides]
    for place in range(0, LENGTH - APPENDED, APPENDED):
        new = [group.rollouts[rollout][place : place + APPENDED] for _, rollout, group in samples]
        for side, seconds in zip(sides, took, strict=True):
            start = time.perf_counter()
            side.step(new, WINDOW)
            seconds.append(time.perf_counter() - start)
    return [median(seconds) for seconds in took]


def resident_bytes(kind: str) -> float:
    """Bytes by which a process grows as one side caches the made-up texts, for each token of them."""
    command = [sys.executable, "-m", "bench.drafts_index", "--resident", kind]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def measure_resident(kind: str) -> float:
    """Print the resident bytes of one index: the child process of `resident_bytes` runs this."""
    groups = made_up_groups()
    if kind == "ours":
        warm_up()
    if kind == "ours":
        side: Side = Paceline(2 * cached_tokens(groups))
    else:
        side = Arctic(int(kind), ARCTIC_LIMITS[0], prefixed=False)
    process = psutil.Process()
    before = process.memory_info().rss
    fill(side, groups, ROLLOUTS)
    return (process.memory_info().rss - before) / cached_tokens(groups)


def cached_tokens(groups: Sequence[RunningGroup]) -> int:
    """Tokens of the rollouts that are cached, prompts not counted."""
    return sum(len(rollout) for group in groups for rollout in group.rollouts[:ROLLOUTS])


def bare_tree_seconds(depth: int, groups: Sequence[RunningGroup]) -> float:
    """Seconds of insertion to arctic's tree without the cache around it, which also keeps one for each request."""
    from arctic_inference.suffix_decoding._C import SuffixTree  # type: ignore[import-not-found]

    tree = SuffixTree(depth)
    texts = [rollout for group in groups for rollout in group.rollouts[:ROLLOUTS]]
    start = time.perf_counter()
    for name, text in enumerate(texts):
        tree.extend_ndarray(name, text)
    return time.perf_counter() - start


def measure_speed(rounds: int = 3) -> dict[str, Any]:
    """Compare insertion, steps and memory of both indexes over cached tokens, at each depth of arctic's."""
    groups = made_up_groups()
    tokens = cached_tokens(groups)
    makers: dict[str, Callable[[], Side]] = {"ours": lambda: Paceline(2 * tokens)}
    if arctic_missing() is None:
        for depth in ARCTIC_DEPTHS:
            makers[f"arctic_{depth}"] = partial(Arctic, depth, ARCTIC_LIMITS[0], prefixed=False)
    warm_up()
    inserted = dict.fromkeys(makers, float("inf"))
    stepped = dict.fromkeys(makers, float("inf"))
    for _ in range(rounds):
        sides = {name: make() for name, make in makers.items()}
        for name, side in sides.items():
            inserted[name] = min(inserted[name], fill(side, groups, ROLLOUTS))
        for name, seconds in zip(sides, step_seconds(list(sides.values()), groups), strict=True):
            stepped[name] = min(stepped[name], seconds)
    figures: dict[str, Any] = {"cached_tokens": tokens}
    if arctic_missing() is None:
        bare = min(bare_tree_seconds(ARCTIC_DEPTHS[0], groups) for _ in range(rounds))
        figures["insert_tokens_per_second_arctic_bare_tree"] = tokens / bare
    for name in makers:
        figures[f"insert_tokens_per_second_{name}"] = tokens / inserted[name]
        figures[f"batch_step_microseconds_{name}"] = stepped[name] * 1e6
        figures[f"bytes_per_token_{name}"] = resident_bytes(name.removeprefix("arctic_"))
    return figures


def measure_acceptance(groups: Sequence[RunningGroup] | None = None, window: int = WINDOW) -> dict[str, Any]:
    """Compare acceptance on tinymath rollouts, half of each prompt's cached and half replayed.

    Arctic's is that of the depth, limits and place of the prompts that accept most per step.
    """
    groups = tinymath_groups() if groups is None else groups
    cached = len(groups[0].rollouts) // 2
    most = 2 * sum(len(group.prompt) + sum(map(len, group.rollouts)) for group in groups)
    figures = {f"{key}_ours": value for key, value in replay(Paceline(most), groups, cached, window).items()}
    if arctic_missing() is None:
        tried = [
            replay(Arctic(depth, limits, prefixed), groups, cached, window)
            for depth in ARCTIC_DEPTHS
            for limits in ARCTIC_LIMITS
            for prefixed in (False, True)
        ]
        best = max(tried, key=lambda one: one["accepted_per_step"])
        figures |= {f"{key}_arctic": value for key, value in best.items()}
    return figures


def compare(figures: dict[str, Any]) -> dict[str, Any]:
    """Compare our index with the better of arctic's depths; null, with the reason, without arctic."""
    missing = arctic_missing()
    if missing is not None:
        return dict.fromkeys(RATIOS) | {"arctic_missing": missing}

    def best(figure: str, choose: Callable[[list[float]], float]) -> float:
        return choose([figures[f"{figure}_arctic_{depth}"] for depth in ARCTIC_DEPTHS])

    step, insert = "batch_step_microseconds", "insert_tokens_per_second"
    return {
        "batch_step_speedup_vs_arctic": best(step, min) / figures[f"{step}_ours"],
        "insert_speedup_vs_arctic": figures[f"{insert}_ours"] / best(insert, max),
        "insert_speedup_vs_arctic_bare_tree": figures[f"{insert}_ours"]
        / figures[f"{insert}_arctic_bare_tree"],
        "bytes_per_token_ratio_vs_arctic": figures["bytes_per_token_ours"] / best("bytes_per_token", min),
        "acceptance_ratio_vs_arctic": figures["accepted_per_step_ours"] / figures["accepted_per_step_arctic"],
    }


def measure() -> dict[str, Any]:
    """All figures of the index."""
    figures = measure_speed() | measure_acceptance()
    return figures | compare(figures)


def main() -> None:
    """Measure, print, and write runs/bench/drafts_index.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--resident", help="only print the resident bytes a token: ours, or arctic's depth")
    options = parser.parse_args()
    if options.resident:
        print(json.dumps(measure_resident(options.resident)))
        return
    figures = measure()
    show("suffix index", figures)
    write("drafts_index", figures)


if __name__ == "__main__":
    main()
