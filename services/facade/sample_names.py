"""Name the samples of HTTP requests, which have neither names nor seeds of their own. Pure.

A prompt is named by a hash of its tokens, a step by the published version. Without a seed, the nth sample of a
prompt in a step has slot n and the seed of this process: equal requests have different samples, also in different
processes. With a seed, slots are counted within the request: equal requests have the same samples, on every facade.
A caller may override the names in the headers X-Paceline-Run, -Step, -Prompt, -Slot and -Prefix.

An aborted request is often sent again as a longer prompt, with the tokens of its answer. These tokens identify
it, and it continues with its former names and noise.
"""

from __future__ import annotations

import secrets
from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline import types as t
from paceline.errors import Violation
from services.contracts.errors import InvalidArgument
from services.facade.dialects.body import Ids, RequestedSamples, prompt_id_of
from services.facade.samples import SampleOutput

RUN, STEP, PROMPT, SLOT, PREFIX = (
    f"X-Paceline-{name}" for name in ("Run", "Step", "Prompt", "Slot", "Prefix")
)
"""Headers of a request that names its samples."""
MOST_COUNTED = 1 << 18
"""Most prompts whose slots are counted; beyond it all counts restart, with another seed."""
MOST_SLOTS = 1 << 10
"""Slots of a prompt in a step; further samples reuse them with another seed. Each slot is kept as a draft."""
_SLOTS = range(1 << 31)
_STEPS = range(1 << 63)
_LONGEST = {RUN: 128, PROMPT: 256}
"""Most characters of names, as in the gateway. Names are kept here before the gateway checks them."""
_MOST_TOKENS = (1 << 31) - 1
"""Largest number of tokens in the protocol: callers use it for "no limit"."""


@dataclass(frozen=True, slots=True)
class GivenNames:
    """Names of samples in the headers of a request; None: the header is missing."""

    run_id: str
    step: int | None = None
    prompt_id: str = ""
    slot: int | None = None
    """Slot of the first sample of each prompt."""
    prefix: int | None = None
    """Tokens at the end of each prompt that are the beginning of its response."""


def given_names(headers: Mapping[str, str], run_id: str) -> GivenNames:
    """Return the names in headers; `run_id` is the default. InvalidArgument names a header."""
    found: list[Violation] = []

    def number(name: str, allowed: range) -> int | None:
        given = headers.get(name)
        if given is None:
            return None
        if given.isascii() and given.isdigit() and len(given) < 20 and int(given) in allowed:
            return int(given)
        text = f"{given[:40]!r} is not allowed; must be a number in [{allowed.start}, {allowed.stop})"
        found.append(Violation(name, text))
        return None

    for name, most in _LONGEST.items():
        if len(given := headers.get(name, "")) > most:
            text = (
                f"has {len(given)} characters; at most {most} are allowed: shorten it, or send a hash of it"
            )
            found.append(Violation(name, text))
    names = GivenNames(
        headers.get(RUN) or run_id,
        number(STEP, _STEPS),
        headers.get(PROMPT, ""),
        number(SLOT, _SLOTS),
        number(PREFIX, _SLOTS),
    )
    if found:
        raise InvalidArgument(found)
    return names


@dataclass(frozen=True, slots=True)
class _AbortedSample:
    prompt_tokens: int
    prompt_id: str
    slot: int
    step: int
    run_seed: int
    logprobs: Sequence[float]
    """Log-probabilities of the response so far; empty: unknown."""


class AbortedSamples:
    """Last aborted samples, by run and a hash of their tokens."""

    def __init__(self, most: int = 1 << 16, most_tokens: int = 1 << 24) -> None:
        """Keep at most `most` samples, with log-probabilities of at most `most_tokens` tokens in total."""
        self._most, self._most_tokens = most, most_tokens
        self._samples: OrderedDict[tuple[str, str], list[_AbortedSample]] = OrderedDict()
        self._count = self._tokens = 0

    def put(self, run_id: str, tokens: Ids, sample: _AbortedSample) -> None:
        """Keep a sample with these tokens of prompt and response."""
        key = (run_id, prompt_id_of(tokens))
        self._samples.setdefault(key, []).append(sample)
        self._samples.move_to_end(key)
        self._add(1, sample)
        while self._count > self._most or self._tokens > self._most_tokens:
            oldest = next(iter(self._samples))
            self._take(oldest, 0)

    def take(self, run_id: str, tokens_id: str, seed: int | None, slot: int | None) -> _AbortedSample | None:
        """Remove and return a sample whose tokens have this hash, with this seed and slot unless None."""
        key = (run_id, tokens_id)
        for index, sample in enumerate(self._samples.get(key, ())):
            if seed in (None, sample.run_seed) and slot in (None, sample.slot):
                return self._take(key, index)
        return None

    def _take(self, key: tuple[str, str], index: int) -> _AbortedSample:
        samples = self._samples[key]
        sample = samples.pop(index)
        if not samples:
            del self._samples[key]
        self._add(-1, sample)
        return sample

    def _add(self, sign: int, sample: _AbortedSample) -> None:
        self._count += sign
        self._tokens += sign * len(sample.logprobs)


class SampleNames:
    """Naming of samples in one process."""

    def __init__(self, *, alone: bool) -> None:
        """Count slots from 0 if this process is `alone`, and else from a random number, to differ from others."""
        self.seed = secrets.randbits(64)
        """Seed of samples whose requests have none."""
        self._first = 0 if alone else secrets.randbelow(1 << 15) << 16
        self._slots: dict[tuple[str, int, str], int] = {}
        self.aborted = AbortedSamples()

    def requests(self, requested: RequestedSamples, given: GivenNames, step: int) -> list[t.SampleRequest]:
        """Return the samples of a request, prompt by prompt; `step` is the default.

        InvalidArgument names a header that does not fit the request.
        """
        _check(requested, given)
        step = step if given.step is None else given.step
        counted: Counter[str] = Counter()
        found = []
        for place, tokens in enumerate(requested.prompts):
            cut = len(tokens) - (given.prefix or 0)
            if requested.prompt_ids:
                tokens_id, own_id = requested.prompt_ids[place]
            else:
                tokens_id = prompt_id_of(tokens)
                own_id = prompt_id_of(tokens[:cut]) if given.prefix else tokens_id
            prompt_id = given.prompt_id or own_id
            for _ in range(requested.each):
                number = counted[prompt_id]
                counted[prompt_id] += 1
                slot = None if given.slot is None else given.slot + number
                if (resumed := self._resumed(requested, given, tokens, tokens_id, slot)) is not None:
                    found.append(resumed)
                    continue
                seed = requested.seed
                if seed is None:
                    slot, seed = self._next(given.run_id, step, prompt_id)
                found.append(
                    t.SampleRequest(
                        run_id=given.run_id,
                        prompt_id=prompt_id,
                        prompt_token_ids=tokens[:cut],
                        slot=number if slot is None else slot,
                        step=step,
                        prefix_token_ids=tokens[cut:],
                        sampling=_after(requested.sampling, len(tokens) - cut),
                        run_seed=seed,
                    )
                )
        return found

    def settle(self, outputs: Sequence[SampleOutput]) -> None:
        """Remember the unfinished samples, each once, for requests that continue them."""
        for output in outputs:
            request, reason = output.request, output.finish_reason
            tokens = output.token_ids if reason is t.FinishReason.ABORTED else []
            unended = reason in (None, t.FinishReason.ABORTED)
            if output.settled or not unended or not (tokens or len(request.prefix_token_ids)):
                continue
            output.settled = True
            prefix = request.prefix_token_ids
            known = len(request.prefix_logprobs) == len(prefix)
            aborted = _AbortedSample(
                prompt_tokens=len(request.prompt_token_ids),
                prompt_id=request.prompt_id,
                slot=request.slot,
                step=request.step,
                run_seed=request.run_seed,
                logprobs=array(
                    "f", [*request.prefix_logprobs, *output.logprobs[: len(tokens)]] if known else ()
                ),
            )
            whole = np.concatenate(
                [np.asarray(each, np.int64) for each in (request.prompt_token_ids, prefix, tokens)]
            )
            self.aborted.put(request.run_id, whole, aborted)

    def _resumed(
        self, requested: RequestedSamples, given: GivenNames, tokens: Ids, tokens_id: str, slot: int | None
    ) -> t.SampleRequest | None:
        """Return the request for the rest of a remembered sample that begins with these tokens, if there is one."""
        if given.prefix is not None or requested.sampling.prompt_logprobs is not None:
            return None
        own = self.aborted.take(given.run_id, tokens_id, requested.seed, slot)
        if own is None:
            return None
        cut = own.prompt_tokens
        return t.SampleRequest(
            run_id=given.run_id,
            prompt_id=own.prompt_id,
            prompt_token_ids=tokens[:cut],
            slot=own.slot,
            step=own.step,
            prefix_token_ids=tokens[cut:],
            prefix_logprobs=own.logprobs,
            sampling=_after(requested.sampling, len(tokens) - cut),
            run_seed=own.run_seed,
        )

    def _next(self, run_id: str, step: int, prompt_id: str) -> tuple[int, int]:
        """Return the next slot of a prompt in a step, and its seed."""
        if len(self._slots) >= MOST_COUNTED:
            # Under the same seed, a slot that is counted again would repeat its sample.
            self._slots.clear()
            self.seed = secrets.randbits(64)
        key = (run_id, step, prompt_id)
        count = self._slots.get(key, 0)
        self._slots[key] = count + 1
        again, slot = divmod(count, MOST_SLOTS)
        return self._first + slot, (self.seed + again) % (1 << 64)


def _check(requested: RequestedSamples, given: GivenNames) -> None:
    found = []
    if given.prompt_id and len(requested.prompts) > 1:
        found.append(Violation(PROMPT, f"names one prompt; the request has {len(requested.prompts)}"))
    if given.slot is not None and requested.seed is None:
        found.append(Violation(requested.seed_field, f"is needed with {SLOT}: both together name a sample"))
    shortest = min(map(len, requested.prompts), default=0)
    if given.prefix is not None and given.prefix >= shortest:
        found.append(Violation(PREFIX, f"{given.prefix} is not below the {shortest} tokens of the prompt"))
    if found:
        raise InvalidArgument(found)


def _after(sampling: t.SamplingParams, prefix: int) -> t.SamplingParams:
    """Return the parameters for a response with a prefix: the limits of a request count new tokens only."""
    if not prefix:
        return sampling
    return replace(
        sampling,
        max_tokens=None if sampling.max_tokens is None else min(sampling.max_tokens + prefix, _MOST_TOKENS),
        min_tokens=min(sampling.min_tokens + prefix, _MOST_TOKENS)
        if sampling.min_tokens
        else sampling.min_tokens,
    )
