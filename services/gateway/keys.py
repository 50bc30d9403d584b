"""Names of the gateway's keys in Redis.

All keys of a batch share one hash tag, and so do all keys of the gateway itself, so that each script
touches one slot of a cluster only.
"""

from dataclasses import dataclass

from services.gateway.batch import BatchKey


@dataclass(frozen=True, slots=True)
class BatchKeys:
    """Keys of one batch. A run id holds no colon, so (run, batch) and the tag determine each other."""

    prefix: str

    @classmethod
    def of(cls, namespace: str, key: BatchKey) -> "BatchKeys":
        run_id, batch_id = key
        return cls(f"{namespace}:{{{run_id}:{batch_id}}}")

    @property
    def meta(self) -> str:
        """Hash: request, fingerprint, accepted_at, total, lenience, owner, finished_at."""
        return f"{self.prefix}:meta"

    @property
    def events(self) -> str:
        """List: serialised samples in completion order; the cursor of an event is its index + 1."""
        return f"{self.prefix}:events"

    @property
    def done(self) -> str:
        """Hash: sample index -> cursor of its event."""
        return f"{self.prefix}:done"

    @property
    def cancels(self) -> str:
        """List: serialised CancelRolloutsRequest."""
        return f"{self.prefix}:cancels"

    def partial(self, index: int) -> tuple[str, str]:
        """Strings: tokens (packed uint32) and log-probabilities (packed float32) of an unfinished sample."""
        return f"{self.prefix}:tokens:{index}", f"{self.prefix}:logprobs:{index}"


@dataclass(frozen=True, slots=True)
class GatewayKeys:
    """Keys of the gateway itself."""

    namespace: str

    @property
    def lease(self) -> str:
        """String: who drives the batches."""
        return f"{self.namespace}:{{gateway}}:lease"

    @property
    def batches(self) -> str:
        """Set: "run:batch" of every unfinished batch."""
        return f"{self.namespace}:{{gateway}}:batches"

    @property
    def published(self) -> str:
        """String: the published version as JSON."""
        return f"{self.namespace}:{{gateway}}:published"

    @property
    def update(self) -> str:
        """String: the update in progress as JSON."""
        return f"{self.namespace}:{{gateway}}:update"

    @property
    def hinted(self) -> str:
        """Set: ids of the runs that have `hints`."""
        return f"{self.namespace}:{{gateway}}:hinted"

    def hints(self, run_id: str) -> str:
        """Hash: step -> serialised HintNextBatchRequest; begun -> the step that began last and its version."""
        return f"{self.namespace}:{{gateway}}:hints:{run_id}"

    def lenience(self, run_id: str) -> str:
        """String: what the l of a run has come to, as JSON."""
        return f"{self.namespace}:{{gateway}}:lenience:{run_id}"
