"""Collaborators that submission, recovery and delivery of batches share, and checks against the fleet."""

from dataclasses import dataclass

from paceline.v1 import rollout_pb2 as pb
from services.contracts.errors import FailedPrecondition, Unavailable
from services.contracts.gateway_keys import BatchKey
from services.contracts.sampling import ModelLimits
from services.gateway.batches.account import Account
from services.gateway.batches.messages import BatchBuilder
from services.gateway.batches.rollout_batch import RolloutBatch
from services.gateway.dispatch.dispatcher import Dispatcher
from services.gateway.dispatch.estimator import Coverage
from services.gateway.dispatch.running_batch import ActiveBatches, RunningBatch
from services.gateway.fleet.health import FleetHealth
from services.gateway.fleet.update_book import UpdateBook
from services.gateway.journal.fenced_records import Leniences
from services.gateway.journal.headroom import RedisHeadroom
from services.gateway.journal.journal import Journal
from services.gateway.journal.recorded_batches import RecordedBatches
from services.platform.security.caller import current_caller


@dataclass(eq=False)
class RolloutIntake:
    """Collaborators of submission and delivery, and checks of requests against the fleet.

    Checked are the policy version of the fleet and the limits of its model.
    """

    fleet: FleetHealth
    book: UpdateBook
    builder: BatchBuilder
    journal: Journal
    records: RecordedBatches
    headroom: RedisHeadroom
    batches: ActiveBatches
    dispatcher: Dispatcher
    leniences: Leniences

    @property
    def version(self) -> int:
        """The published policy version; 0 if there is none."""
        return self.book.version or 0

    def account(self) -> Account | None:
        """Return the account of the current caller; None if that is a service. Unavailable: no instance serves."""
        caller = current_caller()
        return None if caller is None else self.batches.accounts.note(caller, self.limits().max_model_len)

    def begin(
        self, batch: RolloutBatch, *, private: bool = False, events: int = 0, coverage: Coverage | None = None
    ) -> RunningBatch:
        """Begin or resume a batch (see `Dispatcher.add`), under the version that its samples go on with by now."""
        running = self.dispatcher.add(batch, private=private, events=events, coverage=coverage)
        self.dispatcher.go_on(running, self.book.version_for(batch.policy_version, batch.max_staleness))
        return running

    def check_version(self, version: int) -> None:
        """Check that samples of this policy version can be generated now.

        Raises:
            FailedPrecondition: an update is being applied, or the fleet has another version.
            Unavailable: no instance is serving.
        """
        if self.book.is_applying():
            raise FailedPrecondition(
                "UPDATE_APPLYING", "a weight update is being applied; come again after it"
            )
        current = self.book.version
        if current is None or not self.fleet.usable():
            raise Unavailable("no instance is serving", retry_after=2.0)
        if version != current:
            model = self.fleet.usable()[0].record.model
            raise FailedPrecondition(
                "VERSION_MISMATCH",
                f"policy version {version} was asked for; this pool has version {current} of {model}. Submit for "
                f"version {current}, or update the weights to {version} first; a run that needs both at once, or "
                f"another model, needs a pool of its own with version {version}: a gateway and instances with "
                "another namespace",
                current=str(current),
                requested=str(version),
                model=model,
            )

    def check_request(self, request: pb.SubmitRolloutsRequest) -> None:
        """Check that samples of a batch to be submitted or opened can be generated now; raises as `check_batch`.

        A batch of one version begins under that one, though samples that have begun may go on under the next.
        """
        if not request.HasField("max_staleness"):
            return self.check_version(request.policy_version)
        self.check_batch(
            (request.run_id, request.batch_id),
            request.policy_version,
            request.max_staleness,
            regenerates=request.stale == pb.STALE_REGENERATE,
        )

    def check_batch(
        self, key: BatchKey, version: int, max_staleness: int | None, *, regenerates: bool
    ) -> None:
        """Check that samples that a batch begins with, or that are added to it, can be generated now.

        Raises:
            FailedPrecondition: its version is served no more, or is over its `max_staleness`; as `check_version`.
            Unavailable: no instance is serving, or a batch that lives across versions is between two.
        """
        if max_staleness is not None and self.book.is_applying():
            raise Unavailable("a weight update is being applied; come again after it", retry_after=0.5)
        served = self.book.version_for(version, max_staleness)
        self.check_version(version if served is None else served)
        if max_staleness is None or regenerates:
            return
        if self.version - version > max_staleness:
            raise FailedPrecondition(
                "BATCH_STALE",
                f"batch {'/'.join(key)} is of version {version}, and version {self.version} is published: that is "
                f"over its max_staleness, {max_staleness}. Open another for the published version",
                current=str(self.version),
                policy_version=str(version),
                max_staleness=str(max_staleness),
            )

    def limits(self) -> ModelLimits:
        """Return the limits that every usable instance can keep. Unavailable if there is none."""
        records = [member.record for member in self.fleet.usable()]
        if not records:
            raise Unavailable("no instance is serving", retry_after=2.0)
        return ModelLimits(
            vocab_size=min(record.vocab_size for record in records),
            max_model_len=min(record.max_model_len for record in records),
            has_text=all(record.has_text for record in records),
            end_tokens=tuple(records[0].end_tokens),
        )
