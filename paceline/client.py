"""The synchronous client: a training job, its rollouts and its sessions.

    with paceline.Client("127.0.0.1:7400") as client, client.run("run-1", seed=7) as run:
        for step in range(steps):
            samples = list(run.rollout(step, groups, SamplingParams(max_tokens=512)))
            run.push_weights(learner.update(samples))

Written by scripts/blocking-client: change the asynchronous classes instead. Each class here is the face of one of
them (see `paceline.blocking`). Methods raise `PacelineError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, Unpack

from paceline import types as t
from paceline.aio import AsyncClient, AsyncRun, BlockingCore, Source, WeightTransport
from paceline.batches.blocking import OpenBatch, Rollout, Sessions
from paceline.blocking import Face, entered, finish, iterate
from paceline.calls.caller import STREAM_SECONDS, RetryPolicy
from paceline.shards import Shard
from paceline.transport.channel import Tls
from paceline.weights.adapters import Adapter


class Client(Face[AsyncClient]):
    """Client of one deployment, or of several shards. `Client` is thread-safe, `AsyncClient` is for one event loop.

    It follows the gateway that leads. A call that finds no gateway, or a full one, is repeated by the retry policy;
    a stream continues where it was cut. All methods raise `PacelineError`. A client can be pickled: it connects
    again with the same options, and looks again for a token that was found.
    """

    @property
    def address(self) -> str | Sequence[str | Shard]:
        """The address, or the addresses of several shards."""
        return self._core.address

    def __init__(
        self,
        address: str | Sequence[str | Shard],
        *,
        token: str | None = None,
        tls: Tls | None = None,
        timeout: float = 30.0,
        slow_timeout: float = 600.0,
        stream_seconds: float = STREAM_SECONDS,
        leaders_only: bool = True,
        retry: RetryPolicy | None = None,
        use_proxy: bool = False,
        insecure: bool = False,
    ) -> None:
        """Connect on the first call.

        Args:
            address: host:port, or several with commas between, of which one leads; or a list with one such address,
                or `Shard`, for each of several deployments. Runs are spread over these; any other call is made on
                one of them, `client.shard(name)`.
            token: None looks for one: PACELINE_TOKEN, the file that PACELINE_TOKEN_FILE names, or the file of the
                platform that this user runs at this address of this machine. Empty: there is none.
            tls: None connects in plain text.
            timeout: seconds for one attempt at a call.
            slow_timeout: the same for weights and drain, which wait for instances.
            stream_seconds: a stream is opened again where it is after this time.
            leaders_only: False calls any gateway: knobs, decisions and the drafter need no leader.
            retry: limits and delays of retries.
            use_proxy: connect through a proxy that the environment names, except to this machine.
            insecure: send the token in plain text beyond this machine.

        Raises:
            ValueError: an address is invalid, or the token would be sent there in plain text.
        """
        self._core = BlockingCore(
            address,
            token=token,
            tls=tls,
            timeout=timeout,
            slow_timeout=slow_timeout,
            stream_seconds=stream_seconds,
            leaders_only=leaders_only,
            retry=retry,
            use_proxy=use_proxy,
            insecure=insecure,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        finish(self._core.__aexit__(*raised))

    def shard(self, name: str) -> Client:
        """Return a client of one of several shards, on this client's connection. ValueError: no such shard."""
        return Client._of(self._core.shard(name))

    def deployments(self) -> list[Client]:
        """Return a client of each shard, on this client's connections; with one deployment, this client."""
        return [Client._of(each) for each in self._core.deployments()]

    def run(self, run_id: str, *, seed: int = 0, weights: WeightTransport | None = None) -> Run:
        """Return a training job: `seed` seeds its rollouts, `weights` is the transport of its weights.

        The default is a `WeightStream()`, for a trainer that reaches the instances.
        """
        return Run._of(self._core.run(run_id, seed=seed, weights=weights))

    def submit(self, batch: t.Batch) -> t.Submitted:
        """Submit a batch. Submitting the same batch again has no effect and returns the same answer."""
        return finish(self._core.submit(batch))

    def stream(self, run_id: str, batch_id: str, cursor: int = 0) -> Iterator[t.SampleEvent]:
        """Iterate over the finished samples of a batch after the cursor: in completion order, each once.

        A batch that the gateway has lost is submitted again if this client submitted it recently and `cursor` is 0.
        Otherwise DataLossError, because it is not known which samples came before the cursor.
        """
        return iterate(self._core.stream(run_id, batch_id, cursor))

    def ack(self, run_id: str, batch_id: str, cursor: int) -> int:
        """Acknowledge the samples up to a cursor, which are not needed again; return how many were dropped."""
        return finish(self._core.ack(run_id, batch_id, cursor))

    def open_batch(self, batch: t.Batch) -> bool:
        """Open a batch, to which groups are added afterwards; return True if it was opened before.

        The gateway closes an open batch that is neither read nor added to nor acknowledged for some time.
        """
        return finish(self._core.open_batch(batch))

    def add_samples(self, run_id: str, batch_id: str, groups: Iterable[t.Group]) -> int:
        """Add groups to an open batch, all or none; return how many samples they have.

        Groups that the batch already has are skipped, so the call may be repeated. It waits while the gateway is
        full. FailedPreconditionError, reason BATCH_CLOSED or BATCH_STALE: nothing can be added any more.
        """
        return finish(self._core.add_samples(run_id, batch_id, groups))

    def close_batch(self, run_id: str, batch_id: str) -> int:
        """Close a batch, so that nothing can be added; return how many samples it has. May be repeated."""
        return finish(self._core.close_batch(run_id, batch_id))

    def continue_samples(self, run_id: str, batch_id: str, continuations: Iterable[t.Continuation]) -> int:
        """Continue samples that have called tools, all or none; return how many were continued for the first time.

        The call may be repeated. Samples that have ended are skipped. FailedPreconditionError, reason
        SAMPLE_NOT_CALLING: one is at another place. AlreadyExistsError: one was continued with other tokens.
        """
        return finish(self._core.continue_samples(run_id, batch_id, continuations))

    def generate(self, request: t.SampleRequest) -> Iterator[t.TokenDelta | t.Sample]:
        """Generate one sample: iterate over deltas, then the whole sample. Leaving the iteration cancels it."""
        return iterate(self._core.generate(request))

    def cancel(
        self, run_id: str, batch_id: str, samples: Iterable[t.SampleKey] = (), *, keep_partial: bool = False
    ) -> int:
        """End samples of a batch (none named: all); return how many were unfinished."""
        return finish(self._core.cancel(run_id, batch_id, samples, keep_partial=keep_partial))

    def hint(self, hint: t.BatchHint) -> int:
        """Announce the prompts of a coming batch; return how many samples may be pre-generated."""
        return finish(self._core.hint(hint))

    def report_rewards(
        self,
        run_id: str,
        batch_id: str,
        rewards: Iterable[t.Reward] = (),
        *,
        kl: float | None = None,
        clip_fraction: float | None = None,
    ) -> int:
        """Report rewards of finished samples; return how many of the samples were known.

        The policy update on this batch measured `kl` (nats per token, between the policy and the version that
        sampled) and `clip_fraction` (share of tokens whose ratio was clipped, 0 to 1). A report may be repeated.
        """
        return finish(
            self._core.report_rewards(run_id, batch_id, rewards, kl=kl, clip_fraction=clip_fraction)
        )

    def report_single_rewards(self, run_id: str, step: int, rewards: Iterable[t.Reward]) -> int:
        """Report rewards of samples that `generate` finished in a step; return how many of them were known."""
        return finish(self._core.report_single_rewards(run_id, step, rewards))

    def batch(self, run_id: str, batch_id: str) -> t.BatchStatus:
        """Return the progress of a batch. NotFoundError: the gateway keeps nothing of it."""
        return finish(self._core.batch(run_id, batch_id))

    def batches(self, run_id: str = "") -> Iterator[t.BatchStatus]:
        """Iterate over the batches of a run, or of all runs, that the gateway has, in order of acceptance.

        These are the unfinished batches and the ones that finished last.
        """
        return iterate(self._core.batches(run_id))

    def end_run(self, run_id: str) -> t.RunEnded:
        """End a run: cancel its unfinished samples, and drop all samples and hints that are kept for it.

        Returns when that is done. May be repeated, and the run may begin again.
        """
        return finish(self._core.end_run(run_id))

    def start_update(
        self, run_id: str, version: int, target: t.WeightTarget = t.WeightTarget.POLICY, push_id: str = ""
    ) -> t.UpdateStarted:
        """Start the weight update to a version above the current one.

        It replaces an unfinished update of the same run that was started with another `push_id`.
        """
        return finish(self._core.start_update(run_id, version, target, push_id))

    def update_weights(
        self, update_id: str, path: Path | str, checksum: str = "", delta: Path | None = None
    ) -> tuple[t.InstanceUpdate, ...]:
        """Let every instance check and stage a folder (absolute path as the instances see it).

        `delta` is a folder with the changes since the published version, for instances that have that version.
        """
        return finish(self._core.update_weights(update_id, path, checksum, delta))

    def start_stream(
        self, run_id: str, version: int, target: t.WeightTarget = t.WeightTarget.POLICY, push_id: str = ""
    ) -> t.StreamStarted:
        """Start an update whose weights are pushed to an instance, or return another instance for it."""
        return finish(self._core.start_stream(run_id, version, target, push_id))

    def update_streamed(self, update_id: str, checksum: str) -> tuple[t.InstanceUpdate, ...]:
        """Let every instance check and stage the pushed weights."""
        return finish(self._core.update_streamed(update_id, checksum))

    def finish_update(self, update_id: str, in_flight: t.InFlight = t.InFlight.REFUSE) -> t.UpdateFinished:
        """Apply the staged weights between two engine steps and publish the version."""
        return finish(self._core.finish_update(update_id, in_flight))

    def abort_update(self, update_id: str) -> int:
        """Abort an unfinished update; return the version that is served."""
        return finish(self._core.abort_update(update_id))

    def versions(self) -> t.Versions:
        """Return the published versions."""
        return finish(self._core.versions())

    def instances(self) -> tuple[t.Instance, ...]:
        """Return all instances of the fleet."""
        return finish(self._core.instances())

    def watch_fleet(self) -> Iterator[tuple[t.Instance, ...]]:
        """Iterate over the states of the fleet: the current one, then each change; without end."""
        return iterate(self._core.watch_fleet())

    def pause(self, instance_ids: Sequence[str] = ()) -> tuple[str, ...]:
        """Pause engine steps of instances (none named: all) and return their ids; no sample is lost."""
        return finish(self._core.pause(instance_ids))

    def resume(self, instance_ids: Sequence[str] = ()) -> tuple[str, ...]:
        """Resume paused instances (none named: all) and return their ids."""
        return finish(self._core.resume(instance_ids))

    def drain(self, instance_id: str) -> int:
        """Drain an instance permanently; return how many samples were handed over."""
        return finish(self._core.drain(instance_id))

    def knobs(self, run_id: str = "", *, model: str = "", pool: str = "") -> t.KnobSetting:
        """Return the knobs set for a run, a model or a pool, and the knobs in use; without a name, of the fleet.

        UnavailableError: no policy service leads; instances keep the knobs that they have.
        """
        return finish(self._core.knobs(run_id, model=model, pool=pool))

    def set_knobs(
        self, run_id: str, setting: t.KnobSetting, *, model: str = "", pool: str = ""
    ) -> t.KnobChange:
        """Replace the knobs of a scope, named as for `knobs`.

        AbortedError: the knobs have a later revision than `setting.revision`. The kill switch is
        `{"speculation": False}`: plain decoding everywhere.
        """
        return finish(self._core.set_knobs(run_id, setting, model=model, pool=pool))

    def drafter(self) -> t.Drafter:
        """Return the published version of the drafter that is trained online, and its statistics."""
        return finish(self._core.drafter())

    def roll_back_drafter(self, version: int, reason: str = "") -> int:
        """Publish the predecessor of a drafter version again; return its version.

        AbortedError: another version is published.
        """
        return finish(self._core.roll_back_drafter(version, reason))

    def watch_decisions(
        self, run_id: str = "", since: float | None = None, *, kept: bool = False
    ) -> Iterator[t.Decision]:
        """Iterate without end over decisions as they are made, about a run and the fleet; no run named: about all.

        With `since` (unix seconds), begin with the kept decisions from that time on. With `kept`, iterate over kept
        decisions only, without `since` over all of them.
        """
        return iterate(self._core.watch_decisions(run_id, since, kept=kept))

    def close(self) -> None:
        """End every call in progress and the connection."""
        return finish(self._core.close())


class Run(Face[AsyncRun]):
    """One training job of a client.

    The nth batch of a step and policy version always has the same id, so that a trainer that was restarted gets the
    samples that exist already. Batches that are begun concurrently count in the order of the calls.
    """

    def rollouts(
        self,
        batches: Iterable[Iterable[t.Group]],
        sampling: t.SamplingParams | None = None,
        *,
        first_step: int = 0,
        **options: Unpack[t.BatchOptions],
    ) -> Iterator[Rollout]:
        """Submit a batch for each step and yield its samples as `rollout` returns them.

        Each batch is announced while the previous one is generated, so that idle instances generate it ahead.
        `batches` gives the groups of each step: a list, a generator, a data loader, or for the asynchronous client
        an asynchronous iterable. It is read one batch ahead of the steps, so it must not depend on the samples of
        the previous step. A trainer that was restarted gives the batches from `first_step` on. `options` are passed
        to `rollout`.
        """
        for each in iterate(self._core.rollouts(batches, sampling, first_step=first_step, **options)):
            yield Rollout._of(each)

    def push_weights(
        self,
        source: Source,
        target: t.WeightTarget = t.WeightTarget.POLICY,
        *,
        in_flight: t.InFlight = t.InFlight.REFUSE,
    ) -> t.UpdateFinished:
        """Send weights as the next version. When this returns, the fleet serves them.

        `in_flight` decides about samples, of any run, that are unfinished then. With REFUSE they keep their
        version: FailedPreconditionError, reason SAMPLES_UNFINISHED; with KEEP_KV, reason KV_NOT_KEPT if an instance
        keeps none. `finish_push` applies the weights later without sending them again.

        `source` is tensors (numpy or torch), by name or as an iterator of pairs, which are sent through the run's
        `WeightStream` or written to its `WeightFolder`; the asynchronous client reads them in a separate thread. On
        several shards the weights are staged on all before any applies them, and tensors are read once. Or it is a
        folder in Hugging Face layout, which the instances read. `ShardedTensors` are written to a `WeightFolder` by
        all ranks, of which rank 0 pushes. After an error the previous version is served.
        """
        return finish(self._core.push_weights(source, target, in_flight=in_flight))

    def finish_push(self, *, in_flight: t.InFlight = t.InFlight.REFUSE) -> t.UpdateFinished:
        """Apply the weights of the last push, which was refused because of unfinished samples.

        They stay staged until the gateway has had no call about them for its `update_timeout_seconds`; after that,
        or after another push, `NotFoundError`. ValueError: no push of this object was refused.
        """
        return finish(self._core.finish_push(in_flight=in_flight))

    def push_adapter(
        self, source: Adapter | Path | str, *, in_flight: t.InFlight = t.InFlight.REFUSE
    ) -> t.UpdateFinished:
        """Send a LoRA adapter as the next version; instances merge it with the full version that it builds on.

        The full version is the last one that was pushed, or the model that the fleet started with: an adapter
        replaces the previous adapter. `source` is an `Adapter` or the folder of one in PEFT's layout. It is written
        to the run's `WeightFolder`. After an error the previous version is served. `in_flight`: as in
        `push_weights`.
        """
        return finish(self._core.push_adapter(source, in_flight=in_flight))

    @property
    def client(self) -> Client:
        """The client that the job was opened on."""
        return Client._of(self._core.client)  # type: ignore[arg-type]

    @property
    def run_id(self) -> str:
        """The job's name."""
        return self._core.run_id

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        """Acknowledge the batches that were read, unless an exception ends the run."""
        finish(self._core.__aexit__(*raised))

    def close(self) -> None:
        """Acknowledge all batches that were read to their ends: they will not be read again."""
        return self._core.close()

    def end(self) -> t.RunEnded:
        """End the job: cancel its unfinished samples, and drop everything that is kept for it, on every shard."""
        return finish(self._core.end())

    def rollout(
        self,
        step: int,
        groups: Iterable[t.Group],
        sampling: t.SamplingParams | None = None,
        *,
        policy_version: int | None = None,
        **options: Unpack[t.BatchOptions],
    ) -> Rollout:
        """Submit a batch and return its samples as an iterable, in completion order.

        Seeds derive from run, step, prompt and slot, so the same prompt ids again in a step give the same samples
        again, and a warning is logged. For other samples use other prompt ids, or more samples per group.

        The samples are of the published policy version unless `policy_version` names another. A batch that is too
        large for one call (16 MiB, 65,536 samples) is submitted in parts and read as one, the parts in turn.
        Batches of earlier steps that were read to their ends are acknowledged: they cannot be read again. `options`
        are the fields of `BatchOptions`: exactness, deadline, priority, weight, max_staleness and stale.
        """
        return Rollout._of(
            finish(self._core.rollout(step, groups, sampling, policy_version=policy_version, **options))
        )

    @contextmanager
    def open_batch(
        self,
        step: int,
        sampling: t.SamplingParams | None = None,
        *,
        policy_version: int | None = None,
        **options: Unpack[t.BatchOptions],
    ) -> Iterator[OpenBatch]:
        """Open a batch, to which groups are added while its samples are generated and read; close it when left.

        An exception leaves it open, for a trainer that is restarted and opens it again; the gateway closes a batch
        that no client uses. The other parameters are as in `rollout`.
        """
        with entered(self._core.open_batch(step, sampling, policy_version=policy_version, **options)) as core:
            yield OpenBatch._of(core)

    @contextmanager
    def sessions(
        self,
        step: int,
        tools: t.ToolUse,
        sampling: t.SamplingParams | None = None,
        *,
        policy_version: int | None = None,
        **options: Unpack[t.BatchOptions],
    ) -> Iterator[Sessions]:
        """Open a batch whose samples call tools; end its unfinished samples when left.

        An exception leaves it open, for a trainer that is restarted and begins the same sessions again. The other
        parameters are as in `rollout`, but for Stale.REGENERATE; `max_tokens` also counts the tokens of
        environments.
        """
        with entered(
            self._core.sessions(step, tools, sampling, policy_version=policy_version, **options)
        ) as core:
            yield Sessions._of(core)

    def stats(self, step: int) -> dict[str, float]:
        """Return figures of the samples of a step that were read so far, by name, for an experiment logger.

        Names begin with `rollout/`; docs/sdk.md lists them. The figures of the last 8 steps are kept. ValueError:
        this object has requested no samples of the step.
        """
        return self._core.stats(step)

    def hint(
        self,
        step: int,
        groups: Iterable[t.Group],
        sampling: t.SamplingParams | None = None,
        *,
        policy_version: int,
        exactness: t.Exactness | None = None,
    ) -> int:
        """Announce the prompts of a coming step; return how many samples may be pre-generated.

        Each shard gets its prompts; if they are too many for one call, the first ones.
        """
        return finish(
            self._core.hint(step, groups, sampling, policy_version=policy_version, exactness=exactness)
        )

    def report_rewards(
        self,
        batch_id: str,
        rewards: Iterable[t.Reward] = (),
        *,
        kl: float | None = None,
        clip_fraction: float | None = None,
    ) -> int:
        """Report the rewards of a batch, and measurements of its update; return how many samples were known."""
        return finish(self._core.report_rewards(batch_id, rewards, kl=kl, clip_fraction=clip_fraction))
