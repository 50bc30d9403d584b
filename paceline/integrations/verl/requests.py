"""Requests of verl's clients: single samples, which are submitted together as batches.

verl's sampling parameters are translated. If all epochs have the same order, the next step is forecast and
announced.
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
from paceline.integrations import UnsupportedTrainerError
from paceline.prompts import EpochOrder, prompt_id_of

_HOLD_SECONDS = 1.0
"""Seconds for which calls of an announced prompt wait for each other: verl sends them together."""
# Limits of the recorded order of an epoch.
_MOST_PROMPTS, _MOST_TOKENS = 1 << 16, 1 << 24
# verl's answers have no place for log-probabilities of other tokens and of the prompt.
_SAMPLING_FIELDS = {field.name for field in fields(t.SamplingParams)} - {
    "logprobs_mode",
    "top_logprobs",
    "prompt_logprobs",
}
# Not a sampling parameter: it says whether the answer has log-probabilities.
_LOGPROBS = "logprobs"
_MODES = {"raw_logprobs": t.LogprobsMode.RAW, "processed_logprobs": t.LogprobsMode.PROCESSED}

_log = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True)
class RolloutDefaults:
    """Parameters of verl's rollout configuration that apply to all requests."""

    prompt_length: int
    response_length: int
    max_model_len: int | None
    """Most tokens of prompt and response together; None: the model's own length."""
    ignore_eos: bool
    repetition_penalty: float
    logprobs_mode: t.LogprobsMode

    @classmethod
    def read(cls, config: Any) -> Self:
        """Read verl's `RolloutConfig`. UnsupportedTrainerError: its logprobs_mode is not supported."""
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
        """Return the sampling parameters of a request whose prompt has `prompt_tokens` tokens.

        Raises:
            UnsupportedTrainerError: a parameter is not a field of `SamplingParams`, or the prompt leaves no room.
        """
        wanted = {name: value for name, value in given.items() if value is not None and name != _LOGPROBS}
        most = wanted.pop("max_new_tokens", None)
        most = wanted.pop("max_tokens", most)
        if unknown := sorted(wanted.keys() - _SAMPLING_FIELDS):
            raise UnsupportedTrainerError(f"sampling_params has {', '.join(unknown)}, which is not supported")
        if isinstance(stop := wanted.get("stop"), str):
            wanted["stop"] = [stop]
        if "top_k" in wanted:
            # -1 turns it off in verl, 0 in `SamplingParams`.
            wanted["top_k"] = max(wanted["top_k"], 0)
        wanted = {name: tuple(value) if isinstance(value, list) else value for name, value in wanted.items()}
        wanted.setdefault("ignore_eos", self.ignore_eos)
        wanted.setdefault("repetition_penalty", self.repetition_penalty)
        return t.SamplingParams(
            **wanted, max_tokens=self._most_tokens(most, prompt_tokens), logprobs_mode=self.logprobs_mode
        )

    def _most_tokens(self, wanted: int | None, prompt_tokens: int) -> int:
        """Return the most response tokens: the requested number, or the rest of verl's budget per conversation."""
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
    """Return True if a request asks for log-probabilities, by a flag or by a number, which may be 0."""
    value = given.get(_LOGPROBS)
    return value is not None and value is not False


class StepForecast:
    """Forecast of the next step, and the announced samples of the present one.

    verl's calls have no names, and their seeds depend on the batch in which they are submitted. The announced
    samples of a prompt have the seed `run_seed`, so they must be submitted together, and only once in a step.
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
        """The step that was announced last, and its samples by prompt."""
        self._left: dict[str, int] = {}
        """Announced samples of the present step by prompt, without prompts that were taken."""

    def ask(
        self, step: int, prompt_id: str, prompt_token_ids: Sequence[int], sampling: t.SamplingParams
    ) -> t.BatchHint | None:
        """Record a call in a step; return a hint of the next step if it can be forecast."""
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
        """Return the number of announced samples of a prompt in the present step; 0 after `take`."""
        return self._left.get(prompt_id, 0)

    def take(self, step: int, prompt_id: str) -> None:
        """Record that samples of a prompt use the announced seed: later ones of the step need another seed."""
        if step == self._step:
            self._left.pop(prompt_id, None)


@dataclass(slots=True, eq=False)
class VerlCall:
    """Call of a client that waits for one sample."""

    prompt_id: str
    prompt_token_ids: Sequence[int]
    sampling: t.SamplingParams
    answer: asyncio.Future[t.Sample | None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """The sample; None if it was not begun, because calls are rejected during a pause."""

    def settle(self, sample: t.Sample | None) -> None:
        """Answer the call, unless its caller has stopped waiting."""
        if not self.answer.done():
            self.answer.set_result(sample)

    def fail(self, error: Exception) -> None:
        """Answer the call with an error, unless its caller has stopped waiting."""
        if not self.answer.done():
            self.answer.set_exception(error)


class SampleQueue:
    """Queue of the samples of one server, for one event loop.

    Calls that arrive while a batch is being submitted join the next one. So thousands of concurrent calls become
    a few batches, in which equal prompts are a group. Each batch has another seed: the same prompt in two batches
    of a step has different samples.

    While `forecasts` is set, the next step is announced if it can be forecast. The calls of an announced prompt are
    submitted together, with the announced seed, as soon as all have arrived.
    """

    def __init__(
        self, client: GatewayCalls, run_id: str, seed: str, hold_seconds: float = _HOLD_SECONDS
    ) -> None:
        """Give each server of a run another `seed`. Calls of an announced prompt wait up to `hold_seconds`."""
        self.step = 0
        """Step of the next batches."""
        self.forecasts = False
        """Forecast steps. Must be False if other servers get a part of each step."""
        self._client = client
        self._run_id = run_id
        self._seed = seed
        # Makes batch ids unique: a restarted server must not resume its old batches.
        self._launch = uuid.uuid4().hex
        self._batches = 0
        self._waiting: list[VerlCall] = []
        self._forecast = StepForecast(run_id, seed)
        self._announcer = RunRollouts(client, run_id, self._forecast.run_seed)
        self._hold_seconds = hold_seconds
        self._held: dict[tuple[int, str], list[VerlCall]] = {}
        """Calls of announced prompts that wait for further calls, by step and prompt."""
        self._whole: list[tuple[int, list[VerlCall]]] = []
        """Held calls that are ready, a list for each prompt, with their step."""
        self._announcing: set[asyncio.Task[None]] = set()
        self._open = True
        self._rejects = False
        self._submitting: asyncio.Task[None] | None = None
        self._reading: dict[AsyncRollout, asyncio.Task[None]] = {}

    async def sample(self, prompt_token_ids: Sequence[int], sampling: t.SamplingParams) -> t.Sample | None:
        """Generate one sample, after the end of a pause; None if it was rejected because of the pause.

        Raises:
            PacelineError: the sample was refused, or the gateway is lost.
        """
        call = VerlCall(prompt_id_of(prompt_token_ids), prompt_token_ids, sampling)
        if self._rejects:
            return None
        if not (self.forecasts and self._is_held(call)):
            self._waiting.append(call)
        self._submit()
        return await call.answer

    async def pause(self, *, rejects: bool = False) -> int:
        """Cancel all samples, keeping their tokens; return their number once they have ended.

        Later calls wait, or with `rejects` are answered None.
        """
        self._open, self._rejects = False, rejects
        if self._submitting is not None:
            # A batch that is being submitted has samples as soon as it is accepted.
            await self._submitting
        if rejects:
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
        self._open, self._rejects = True, False
        self._submit()

    def _is_held(self, call: VerlCall) -> bool:
        """Announce the next step if it is forecast; return True if the call must wait for others of its prompt."""
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
        """Make the held calls of a prompt ready, unless that has happened already."""
        if self._held.get(key) is not held:
            return
        del self._held[key]
        self._forecast.take(*key)
        self._whole.append((key[0], held))
        self._submit()

    async def _announce(self, hint: t.BatchHint) -> None:
        """Announce a step. A failure costs only speed."""
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
        """Submit the calls of announced prompts as one batch. Calls for which that fails join the waiting ones."""
        groups: dict[str, list[VerlCall]] = {}
        for step, calls in whole:
            if step == self.step:
                groups[calls[0].prompt_id] = calls
            else:
                # The trainer has moved to another step, for which this seed was not announced.
                self._waiting += calls
        if not groups:
            return
        try:
            version = await self._client.shards.version()
            rollout = AsyncRollout(self._client, self._batch(groups, version, self._forecast.run_seed))
            await rollout.begin()
        except InvalidArgumentError:
            # `_submit_calls` makes only the refused call fail.
            self._waiting += [call for calls in groups.values() for call in calls]
        except Exception as error:
            _fail([call for calls in groups.values() for call in calls], error)
        else:
            self._reading[rollout] = asyncio.create_task(self._read(rollout, groups))

    async def _submit_calls(self, calls: list[VerlCall]) -> None:
        """Submit calls as one batch. If a call is refused, only that one fails."""
        groups = self._grouped(calls)
        try:
            batch = self._batch(groups, await self._client.shards.version())
            rollout = AsyncRollout(self._client, batch)
            await rollout.begin()
        except InvalidArgumentError as error:
            # Without the calls that wait for the next batch.
            members = [call for group in groups.values() for call in group]
            if len(groups) == 1:
                _fail(members, error)
                return
            middle = len(members) // 2
            await self._submit_calls(members[:middle])
            await self._submit_calls(members[middle:])
        except Exception as error:
            _fail([call for group in groups.values() for call in group], error)
        else:
            self._reading[rollout] = asyncio.create_task(self._read(rollout, groups))

    def _grouped(self, calls: list[VerlCall]) -> dict[str, list[VerlCall]]:
        """Group calls by prompt. A call whose group has other sampling parameters waits for the next batch."""
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
        """Return a batch with `run_seed`, or with a new seed."""
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
        # The batch has ended and was acknowledged meanwhile.
        return 0


def _fail(calls: list[VerlCall], error: Exception) -> None:
    for call in calls:
        call.fail(error)
