"""The sync client.

    with paceline.Client("127.0.0.1:7400") as client:
        client.submit(batch)
        for event in client.stream(batch.run_id, batch.batch_id):
            train_on(event.sample)

Methods raise `PacelineError`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc

from paceline import calls, channel, errors
from paceline import types as t
from paceline.retry import Backoff, RetryPolicy
from paceline.run import Run
from paceline.stubs import stubs_on
from paceline.weights import WeightFolder

R = TypeVar("R")


class Client:
    """Talks to one gateway. Thread-safe.

    Calls that find it unreachable are repeated by the retry policy; streams go on where they were cut.
    All methods raise `PacelineError`.
    """

    def __init__(
        self,
        address: str,
        *,
        token: str | None = None,
        tls: channel.Tls | None = None,
        timeout: float = 30.0,
        slow_timeout: float = 600.0,
        retry: RetryPolicy | None = None,
    ) -> None:
        """Connects on the first call. Timeouts are seconds for one attempt; weights and drain are slow."""
        self.address = address
        self._channel = channel.open_channel(address, tls)
        self._stubs = stubs_on(self._channel)
        self._metadata = channel.call_metadata(token)
        self._timeouts = {False: timeout, True: slow_timeout}
        self._retry = retry or RetryPolicy()
        self._closed = threading.Event()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends every call in progress and the connection."""
        self._closed.set()
        self._channel.close()

    def run(self, run_id: str, *, seed: int = 0, weights: WeightFolder | None = None) -> Run:
        """A training job: its rollouts are seeded by `seed`, its weights are kept in `weights`."""
        return Run(self, run_id, seed, weights)

    # Rollouts

    def submit(self, batch: t.Batch) -> t.Submitted:
        """Submits a batch; the same batch again is answered as before."""
        return self.call(calls.submit(batch))

    def stream(self, run_id: str, batch_id: str, cursor: int = 0) -> Iterator[t.SampleEvent]:
        """The finished samples of a batch in completion order, those after the cursor, each once."""
        return self.events(calls.stream(run_id, batch_id, cursor))

    def generate(self, request: t.SampleRequest) -> Iterator[t.TokenDelta | t.Sample]:
        """One sample: deltas, then the whole sample. Leaving the iteration cancels it."""
        return self.events(calls.generate(request))

    def cancel(
        self, run_id: str, batch_id: str, samples: Iterable[t.SampleKey] = (), *, keep_partial: bool = False
    ) -> int:
        """Ends samples of a batch (none named: all) and returns how many were unfinished."""
        return self.call(calls.cancel(run_id, batch_id, samples, keep_partial))

    def hint(self, hint: t.BatchHint) -> int:
        """Names the prompts to come; returns how many samples may be pre-generated."""
        return self.call(calls.hint(hint))

    def report_rewards(
        self,
        run_id: str,
        batch_id: str,
        rewards: Iterable[t.Reward] = (),
        *,
        kl: float | None = None,
        clip_fraction: float | None = None,
    ) -> int:
        """Reports rewards of finished samples; returns how many were known.

        `kl` (nats per token, between the policy and the one that sampled) and `clip_fraction` (share of
        tokens whose ratio was clipped) are what the update on this batch measured. A report may be repeated.
        """
        return self.call(calls.report_rewards(run_id, batch_id, rewards, kl, clip_fraction))

    # Weights

    def start_update(
        self, run_id: str, version: int, target: t.WeightTarget = t.WeightTarget.POLICY
    ) -> t.UpdateStarted:
        """Claims a weight update to a version above the current one."""
        return self.call(calls.start_update(run_id, version, target))

    def update_weights(
        self, update_id: str, path: Path | str, checksum: str = ""
    ) -> tuple[t.InstanceUpdate, ...]:
        """Has every instance check and stage a folder (absolute path as the instances see it)."""
        return self.call(calls.update_weights(update_id, str(path), checksum))

    def finish_update(self, update_id: str) -> t.UpdateFinished:
        """Applies the staged weights between two engine steps, and publishes the version."""
        return self.call(calls.finish_update(update_id))

    def abort_update(self, update_id: str) -> int:
        """Forgets an unfinished update; returns the version served."""
        return self.call(calls.abort_update(update_id))

    def versions(self) -> t.Versions:
        """The published versions."""
        return self.call(calls.versions())

    # Fleet

    def instances(self) -> tuple[t.Instance, ...]:
        """The fleet now."""
        return self.call(calls.instances())

    def watch_fleet(self) -> Iterator[tuple[t.Instance, ...]]:
        """The fleet now, then whenever it changes; without end."""
        return self.events(calls.watch_fleet())

    def pause(self, instance_ids: Sequence[str] = ()) -> tuple[str, ...]:
        """Stops engine steps, of all when none is named; nothing is lost."""
        return self.call(calls.pause(instance_ids))

    def resume(self, instance_ids: Sequence[str] = ()) -> tuple[str, ...]:
        """Goes on after a pause."""
        return self.call(calls.resume(instance_ids))

    def drain(self, instance_id: str) -> int:
        """Empties an instance for good; returns how many samples were handed over."""
        return self.call(calls.drain(instance_id))

    def policy(self, run_id: str = "", *, model: str = "", pool: str = "") -> t.Policy:
        """The knobs that are set for a run, a model or a pool; without a name, for the whole fleet."""
        return self.call(calls.policy(run_id, model, pool))

    def set_policy(self, run_id: str, policy: t.Policy, *, model: str = "", pool: str = "") -> t.PolicyChange:
        """Replaces the knobs of a scope, named as for `policy`, by others made from their revision.

        `{"speculation": False}` turns everything to plain decoding.
        """
        return self.call(calls.set_policy(run_id, policy, model, pool))

    def drafter(self) -> t.Drafter:
        """The drafter that is trained online."""
        return self.call(calls.drafter())

    def roll_back_drafter(self, version: int, reason: str = "") -> int:
        """Goes back from this version to the one before, and returns that. AbortedError: another is published."""
        return self.call(calls.roll_back_drafter(version, reason))

    def watch_decisions(self, run_id: str = "", since: float | None = None) -> Iterator[t.Decision]:
        """Decisions as they are made, without end: of a run and of the fleet, or all.

        `since` (unix seconds) begins with those that were made from then on, as far as they are kept.
        """
        return self.events(calls.watch_decisions(run_id, since))

    # How calls are made

    def call(self, unary: calls.Unary[R]) -> R:
        """Makes a call, again while the service is unreachable."""
        method = getattr(self._stubs[unary.service], unary.method)
        backoff = Backoff(self._retry)
        while True:
            request = iter([unary.request]) if unary.streams_request else unary.request
            try:
                timeout = self._timeouts[unary.slow]
                return unary.read(method(request, timeout=timeout, metadata=self._metadata))
            except grpc.RpcError as error:
                self._wait(backoff, errors.from_rpc(error))

    def events(self, stream: calls.Stream[R]) -> Iterator[R]:
        """Reads a stream, and goes on with a new one when it is cut."""
        method = getattr(self._stubs[stream.service], stream.method)
        backoff = Backoff(self._retry)
        seen = False
        while True:
            attempt = method(stream.request(), metadata=self._metadata)
            try:
                for answer in attempt:
                    backoff.progress()
                    event = stream.read(answer)
                    if event is not None:
                        seen = True
                        yield event
                if stream.complete():
                    return
                self._wait(backoff, errors.cut_short())
            except grpc.RpcError as error:
                translated = errors.from_rpc(error)
                if seen and not stream.resumable:
                    raise translated from None
                self._wait(backoff, translated)
            finally:
                attempt.cancel()

    def follow(self, steps: calls.Steps[R]) -> R:
        """Makes the calls of a procedure, one after the other."""
        try:
            step = next(steps)
            while True:
                try:
                    answer: Any = step.work() if isinstance(step, calls.Local) else self.call(step)
                except BaseException as error:
                    step = steps.throw(error)
                else:
                    step = steps.send(answer)
        except StopIteration as done:
            result: R = done.value
            return result

    def _wait(self, backoff: Backoff, error: errors.PacelineError) -> None:
        """Waits until the next attempt is due; raises the error when there is to be none."""
        delay = backoff.delay_after(error)
        if delay is None or self._closed.wait(delay):
            raise error from None
