"""Requests of verl's clients: single samples, submitted together as batches.

verl's sampling parameters are translated. Where epochs have one order, the next step is forecast and announced.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from paceline import types as t
from paceline.batches.rollout import AsyncRollout
from paceline.batches.run_rollouts import RunRollouts
from paceline.calls import GatewayCalls
from paceline.errors import InvalidArgumentError, NotFoundError, PacelineError
from paceline.integrations.errors import UnsupportedTrainerError
from paceline.prompts import EpochOrder, prompt_id_of

# Those of other tokens and of the prompt have no place in verl's answers.
_NAMES = {field.name for field in fields(t.SamplingParams)} - {
    "logprobs_mode",
    "top_logprobs",
    "prompt_logprobs",
}
# Not a parameter of sampling: a request that wants none is given none.
_LOGPROBS = "logprobs"
_MODES = {"raw_logprobs": t.LogprobsMode.RAW, "processed_logprobs": t.LogprobsMode.PROCESSED}


@dataclass(frozen=True, slots=True)
class RolloutDefaults:
    """Parameters that the configuration of verl's rollout sets for all requests."""

    prompt_length: int
    response_length: int
    max_model_len: int | None
    """Prompt and response together; None: the model's own length."""
    ignore_eos: bool
    repetition_penalty: float
    logprobs_mode: t.LogprobsMode

    @classmethod
    def read(cls, config: Any) -> Self:
        """Read them off verl's `RolloutConfig`. UnsupportedTrainerError: its logprobs_mode is not supported."""
        mode = config.logprobs_mode or "raw_logprobs"
        if mode not in _MODES:
            raise UnsupportedTrainerError(f"rollout.logprobs_mode={mode}: supported are {', '.join(_MODES)}")
        return cls(
            config.prompt_length,
            config.response_length,
            config.max_model_len,
            config.ignore_eos,
            config.repetition_penalty,
            _MODES[mode],
        )

    def sampling(self, given: Mapping[str, Any], prompt_tokens: int) -> t.SamplingParams:
        """Return the sampling parameters of a request whose prompt has so many tokens.

        Raises:
            UnsupportedTrainerError: a parameter is no field of `SamplingParams`, or the prompt leaves no room.
        """
        wanted = {name: value for name, value in given.items() if value is not None and name != _LOGPROBS}
        most = wanted.pop("max_new_tokens", None)
        most = wanted.pop("max_tokens", most)
        if unknown := sorted(wanted.keys() - _NAMES):
            raise UnsupportedTrainerError(f"sampling_params has {', '.join(unknown)}, which is not supported")
        if isinstance(stop := wanted.get("stop"), str):
            wanted["stop"] = [stop]
        if "top_k" in wanted:
            # -1 is verl's word for off.
            wanted["top_k"] = max(wanted["top_k"], 0)
        wanted = {name: tuple(value) if isinstance(value, list) else value for name, value in wanted.items()}
        wanted.setdefault("ignore_eos", self.ignore_eos)
        wanted.setdefault("repetition_penalty", self.repetition_penalty)
        return t.SamplingParams(
            **wanted, max_tokens=self._most_tokens(most, prompt_tokens), logprobs_mode=self.logprobs_mode
        )

    def _most_tokens(self, wanted: int | None, prompt_tokens: int) -> int:
        """Return the most response tokens: those wanted, or what verl's budget of a conversation leaves."""
        if wanted is None:
            left = self.prompt_length + self.response_length - prompt_tokens
            wanted = min(self.response_length, left)
        room = None if self.max_model_len is None else self.max_model_len - prompt_tokens
        if room is not None and room < 1:
            raise UnsupportedTrainerError(
                f"a prompt of {prompt_tokens} tokens leaves no room: max_model_len is {self.max_model_len}"
            )
        return max(1, wanted if room is None else min(wanted, room))


def wants_logprobs(given: Mapping[str, Any]) -> bool:
    """Return True if a request asks for log-probabilities: by a flag, or by a number, which may be 0."""
    value = given.get(_LOGPROBS)
    return value is not None and value is not False


_MOST_PROMPTS, _MOST_TOKENS = 1 << 16, 1 << 24


class StepForecast:
    """Prompts of the steps so far, and the samples that were announced of the present one.

    verl's calls have no names, and their seeds go by the batches that they come into. The announced samples of a
    prompt have the one seed `run_seed`, so they must be submitted together, and once in a step.
    """

    def __init__(self, run_id: str, seed: str) -> None:
        digest = hashlib.blake2b(f"{seed}.announced".encode(), digest_size=8).digest()
        self.run_seed = int.from_bytes(digest, "little")
        self._run_id = run_id
        self._order = EpochOrder(_MOST_PROMPTS, _MOST_TOKENS)
        self._step = -1
        self._asked: Counter[str] = Counter()
        """Calls of each prompt in the present step."""
        self._coming: tuple[int, dict[str, int]] = (-1, {})
        """Step that was announced last, and its samples by prompt."""
        self._left: dict[str, int] = {}
        """Announced samples of the present step by prompt, of prompts that were not taken yet."""

    def ask(
        self, step: int, prompt_id: str, prompt_token_ids: Sequence[int], sampling: t.SamplingParams
    ) -> t.BatchHint | None:
        """Note a call in a step; return a hint of the next step where that is forecast."""
        if step != self._step:
            self._step = step
            self._asked.clear()
            announced, samples = self._coming
            self._left = samples if announced == step else {}
        slot = self._asked[prompt_id]
        self._asked[prompt_id] += 1
        hint = self._order.ask(
            t.SampleRequest(
                self._run_id,
                prompt_id,
                prompt_token_ids,
                slot=slot,
                step=step,
                sampling=sampling,
                run_seed=self.run_seed,
            )
        )
        if hint is not None:
            self._coming = (hint.step, {group.prompt_id: group.samples for group in hint.groups})
        return hint

    def wanted(self, prompt_id: str) -> int:
        """Return how many samples of a prompt were announced of the present step; 0 once they were taken."""
        return self._left.get(prompt_id, 0)

    def take(self, step: int, prompt_id: str) -> None:
        """Note that samples of the prompt get the announced seed: later ones of the step must have another."""
        if step == self._step:
            self._left.pop(prompt_id, None)


_log = logging.getLogger("paceline")

_HOLD_SECONDS = 1.0
"""Seconds for which calls of an announced prompt wait for each other: verl sends them at once."""


@dataclass(slots=True, eq=False)
class VerlCall:
    """A sample that somebody waits for."""

    prompt_id: str
    prompt_token_ids: Sequence[int]
    sampling: t.SamplingParams
    answer: asyncio.Future[t.Sample | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """None: it was not begun, because samples that come during a pause are sent away."""

    def settle(self, sample: t.Sample | None) -> None:
        """Answer, unless nobody waits any more."""
        if not self.answer.done():
            self.answer.set_result(sample)

    def fail(self, error: Exception) -> None:
        """Answer with an error, unless nobody waits any more."""
        if not self.answer.done():
            self.answer.set_exception(error)


class SampleQueue:
    """The samples of one server, for one event loop.

    Those that come while a batch is submitted go with the next one, so that thousands of calls at once are a few
    batches, and equal prompts among them a group. Each batch has another seed: the same prompt in two batches
    of a step has different samples.

    While `forecasts` is set, the next step is announced where it is forecast. The calls of an announced prompt go
    together, with the seed that was announced, as soon as all have come.
    """

    def __init__(
        self, client: GatewayCalls, run_id: str, seed: str, hold_seconds: float = _HOLD_SECONDS
    ) -> None:
        """`seed` must be another for each server of a run. Calls of an announced prompt wait `hold_seconds`."""
        self.step = 0
        """Step of the batches to come."""
        self.forecasts = False
        """Forecast steps. Must be False if other servers have a part of each step."""
        self._client = client
        self._run_id = run_id
        self._seed = seed
        # A server that starts again must not meet the batches that it had.
        self._launch = uuid.uuid4().hex
        self._batches = 0
        self._waiting: list[VerlCall] = []
        self._forecast = StepForecast(run_id, seed)
        self._announcer = RunRollouts(client, run_id, self._forecast.run_seed)
        self._hold_seconds = hold_seconds
        self._held: dict[tuple[int, str], list[VerlCall]] = {}
        """Calls of announced prompts that wait for the others of their step and prompt."""
        self._whole: list[tuple[int, list[VerlCall]]] = []
        """Calls that wait no longer, a list for each prompt, with their step."""
        self._announcing: set[asyncio.Task[None]] = set()
        self._open = True
        self._sends_away = False
        self._submitting: asyncio.Task[None] | None = None
        self._reading: dict[AsyncRollout, asyncio.Task[None]] = {}

    async def sample(self, prompt_token_ids: Sequence[int], sampling: t.SamplingParams) -> t.Sample | None:
        """Generate one sample. It waits for the end of a pause; None: it was sent away instead.

        Raises:
            PacelineError: it was refused, or its gateway is lost.
        """
        call = VerlCall(prompt_id_of(prompt_token_ids), prompt_token_ids, sampling)
        if self._sends_away:
            return None
        if not (self.forecasts and self._is_held(call)):
            self._waiting.append(call)
        self._submit()
        return await call.answer

    async def pause(self, *, sends_away: bool = False) -> int:
        """End all samples where they are, with their tokens; return how many, once they have ended.

        Those that come from now on wait, or with `sends_away` are answered None.
        """
        self._open, self._sends_away = False, sends_away
        if self._submitting is not None:
            # A batch on its way has samples as soon as it is accepted.
            await self._submitting
        if sends_away:
            groups = [self._waiting, *self._held.values(), *(calls for _, calls in self._whole)]
            self._waiting, self._held, self._whole = [], {}, []
            for call in (call for group in groups for call in group):
                call.settle(None)
        reading = dict(self._reading)
        ended = await asyncio.gather(*(_cancel(rollout) for rollout in reading))
        await asyncio.gather(*reading.values())
        return sum(ended)

    def resume(self) -> None:
        """End a pause."""
        self._open, self._sends_away = True, False
        self._submit()

    def _is_held(self, call: VerlCall) -> bool:
        """Announce the next step where it is forecast; return True if the call waits for others of its prompt."""
        hint = self._forecast.ask(self.step, call.prompt_id, call.prompt_token_ids, call.sampling)
        if hint is not None:
            task = asyncio.create_task(self._announce(hint))
            self._announcing.add(task)
            task.add_done_callback(self._announcing.discard)
        wanted = self._forecast.wanted(call.prompt_id)
        key = self.step, call.prompt_id
        held = self._held.get(key)
        if not wanted or (held and held[0].sampling != call.sampling):
            return False
        if held is None:
            held = self._held[key] = []
            asyncio.get_running_loop().call_later(self._hold_seconds, self._release, key, held)
        held.append(call)
        if len(held) == wanted:
            self._release(key, held)
        return True

    def _release(self, key: tuple[int, str], held: list[VerlCall]) -> None:
        """Let the calls of a prompt wait for each other no more, if these still do."""
        if self._held.get(key) is not held:
            return
        del self._held[key]
        self._forecast.take(*key)
        self._whole.append((key[0], held))
        self._submit()

    async def _announce(self, hint: t.BatchHint) -> None:
        """Announce a step. A failure costs speed alone."""
        try:
            await self._announcer.hint(
                hint.step, hint.groups, hint.sampling, policy_version=hint.policy_version
            )
        except PacelineError as error:
            _log.warning("step %d of run %s was not announced: %s", hint.step, hint.run_id, error)

    def _submit(self) -> None:
        if self._open and self._submitting is None and (self._waiting or self._whole):
            self._submitting = asyncio.create_task(self._submit_waiting())

    async def _submit_waiting(self) -> None:
        try:
            while self._open and (self._waiting or self._whole):
                whole, self._whole = self._whole, []
                if whole:
                    await self._submit_announced(whole)
                calls, self._waiting = self._waiting, []
                if calls:
                    await self._submit_calls(calls)
        finally:
            self._submitting = None

    async def _submit_announced(self, whole: list[tuple[int, list[VerlCall]]]) -> None:
        """Submit the calls of announced prompts as one batch. What cannot be so goes with the others."""
        groups: dict[str, list[VerlCall]] = {}
        for step, calls in whole:
            if step == self.step:
                groups[calls[0].prompt_id] = calls
            else:
                # The trainer is at another step by now, for which this seed was not announced.
                self._waiting += calls
        if not groups:
            return
        try:
            version = await self._client.shards.version()
            rollout = AsyncRollout(self._client, self._batch(groups, version, self._forecast.run_seed))
            await rollout.begin()
        except InvalidArgumentError:
            # There, one that is refused fails alone.
            self._waiting += [call for calls in groups.values() for call in calls]
        except Exception as error:
            _fail([call for calls in groups.values() for call in calls], error)
        else:
            self._reading[rollout] = asyncio.create_task(self._read(rollout, groups))

    async def _submit_calls(self, calls: list[VerlCall]) -> None:
        """Submit calls as one batch. Where a call is refused, only that one fails."""
        groups = self._grouped(calls)
        try:
            batch = self._batch(groups, await self._client.shards.version())
            rollout = AsyncRollout(self._client, batch)
            await rollout.begin()
        except InvalidArgumentError as error:
            if len(groups) == 1:
                _fail(calls, error)
                return
            members = [call for group in groups.values() for call in group]
            middle = len(members) // 2
            await self._submit_calls(members[:middle])
            await self._submit_calls(members[middle:])
        except Exception as error:
            _fail([call for group in groups.values() for call in group], error)
        else:
            self._reading[rollout] = asyncio.create_task(self._read(rollout, groups))

    def _grouped(self, calls: list[VerlCall]) -> dict[str, list[VerlCall]]:
        """Group calls by prompt. Those whose prompt is there with other sampling parameters wait once more."""
        groups: dict[str, list[VerlCall]] = {}
        for call in calls:
            group = groups.setdefault(call.prompt_id, [])
            if group and group[0].sampling != call.sampling:
                self._waiting.append(call)
            else:
                group.append(call)
        return groups

    def _batch(
        self, groups: dict[str, list[VerlCall]], policy_version: int, run_seed: int | None = None
    ) -> t.Batch:
        """Return a batch with the seed that was announced, or a new one."""
        self._batches += 1
        seed = hashlib.blake2b(f"{self._seed}.{self._batches}".encode(), digest_size=8)
        own = int.from_bytes(seed.digest(), "little")
        return t.Batch(
            run_id=self._run_id,
            batch_id=f"{self._launch}.{self._batches}",
            step=self.step,
            policy_version=policy_version,
            groups=[
                t.Group(prompt_id, calls[0].prompt_token_ids, len(calls), calls[0].sampling)
                for prompt_id, calls in groups.items()
            ],
            run_seed=own if run_seed is None else run_seed,
        )

    async def _read(self, rollout: AsyncRollout, groups: dict[str, list[VerlCall]]) -> None:
        try:
            async for sample in rollout:
                groups[sample.prompt_id][sample.slot].settle(sample)
            rollout.post_ack()
        except Exception as error:
            _fail([call for group in groups.values() for call in group], error)
        finally:
            del self._reading[rollout]


async def _cancel(rollout: AsyncRollout) -> int:
    try:
        return await rollout.cancel(keep_partial=True)
    except NotFoundError:
        # It has ended meanwhile, and was acknowledged.
        return 0


def _fail(calls: list[VerlCall], error: Exception) -> None:
    for call in calls:
        call.fail(error)
