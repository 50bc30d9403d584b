"""Name the gateway's keys in Redis.

All keys of a batch share one hash tag, and so do all keys of the gateway itself, so that each script stays in one
slot of a cluster.
"""

BatchKey = tuple[str, str]
"""Run id and batch id."""


class BatchKeys:
    """Keys of one batch. A run id has no colon, so (run, batch) and the tag determine each other."""

    def __init__(self, namespace: str, key: BatchKey) -> None:
        run_id, batch_id = key
        prefix = f"{namespace}:{{{run_id}:{batch_id}}}"
        self.meta = f"{prefix}:meta"
        """Hash: request, fingerprint, accepted_at, total, lenience, open, account, term, acked, trimmed,
        finished_at."""
        self.events = f"{prefix}:events"
        """Hash: sample index -> serialised sample without its chunks, until it is acknowledged."""
        self.done = f"{prefix}:done"
        """Hash: sample index -> "cursor:chunks:tokens": cursor of its event, count and tokens of its chunks."""
        self.cancels = f"{prefix}:cancels"
        """List: serialised CancelRolloutsRequest."""
        self.chunks = f"{prefix}:chunks"
        """Hash: index:number -> chunk of a sample; index -> "chunks:tokens", for samples with chunks."""
        self.adds = f"{prefix}:adds"
        """List: serialised SubmitRolloutsRequest with the groups of one AddSamples, which follow `request`."""

    @property
    def all(self) -> tuple[str, str, str, str, str, str]:
        """All keys in the order in which scripts take them."""
        return self.meta, self.events, self.done, self.cancels, self.chunks, self.adds


class GatewayKeys:
    """Keys of the gateway itself."""

    def __init__(self, namespace: str) -> None:
        self._prefix = f"{namespace}:{{gateway}}"
        self.lease = f"{self._prefix}:lease"
        """String: term of the leading gateway."""
        self.format = f"{self._prefix}:format"
        """String: version of the journal's format."""
        self.batches = f"{self._prefix}:batches"
        """Set: "run:batch" of every unfinished batch."""
        self.published = f"{self._prefix}:published"
        """String: the published version as JSON."""
        self.update = f"{self._prefix}:update"
        """String: the update in progress as JSON."""
        self.hinted = f"{self._prefix}:hinted"
        """Set: ids of the runs with `hints`."""

    def hints(self, run_id: str) -> str:
        """Return the key of the hash of a run's hints.

        step -> serialised HintNextBatchRequest; begun -> the latest step to begin, and its version.
        """
        return f"{self._prefix}:hints:{run_id}"

    def lenience(self, run_id: str) -> str:
        """Return the key of a string: the current lenience l of a run, as JSON."""
        return f"{self._prefix}:lenience:{run_id}"
