"""Settings of the gateway."""

from pydantic import Field

from services.platform.config import ServiceConfig


class GatewayConfig(ServiceConfig):
    """Everything that can be set; see services.platform.config for what all services share."""

    port: int = 7400
    """Port of the gRPC server."""
    max_queued_samples: int = Field(65536, ge=1)
    """Most unfinished samples over all batches; above it SubmitRollouts answers RESOURCE_EXHAUSTED."""
    max_batch_seconds: float = Field(14400.0, gt=0)
    """Longest deadline of a batch, and the deadline of one that names none."""
    max_attempts: int = Field(16, ge=1)
    """A sample is FAILED after so many attempts in a row that brought no token."""
    room_factor: float = Field(1.25, gt=0)
    """Samples given to an instance, as a multiple of what it runs at once. What is above 1 waits on the
    instance, so that a finished sample is followed by the next without a round trip."""
    affinity_slack: float = Field(1.0, ge=0)
    """How much more loaded, in lengths of the sample to be placed, an instance may be that already has
    samples of the same prompt."""
    history: bool = True
    """Whether finished samples are kept in the draft store, for later epochs to reuse."""
    learner_feed: bool = True
    """Whether finished samples and their rewards go to the learner of the drafter, while there is one."""
    learner_feed_entries: int = Field(8192, ge=1)
    """Entries of that stream, one for each sample and report of rewards; of more, the oldest are lost."""
    learner_linger_seconds: float = Field(120.0, ge=0)
    """How long it is kept up for a learner that is gone, which then finds what came meanwhile."""
    max_hint_steps: int = Field(8, ge=1)
    """Coming steps of a run whose hints are kept; of more, the nearest."""
    max_hint_bytes: int = Field(64 * 1024 * 1024, ge=1)
    """Memory for the hints of all runs; one that does not fit is not kept."""
    draft_cost: float = Field(0.15, ge=0, le=1)
    """What a drafted token costs, as a share of a generated one; used for placement only."""
    coverage_timeout_seconds: float = Field(0.1, gt=0)
    """How long a submission waits to be told what is pre-generated of its step."""
    run_idle_seconds: float = Field(14400.0, gt=0)
    """A run without a batch or a hint for so long is forgotten, and its hints with it."""
    retention_seconds: float = Field(86400.0, ge=1)
    """How long a finished batch can still be streamed."""
    lease_seconds: float = Field(5.0, ge=0.5)
    """A gateway that is silent for so long is succeeded by a standby."""
    registry_poll_seconds: float = Field(0.25, gt=0)
    """How often the registry is read."""
    handshake_timeout_seconds: float = Field(3.0, gt=0)
    """Deadline of short calls to instances."""
    abort_timeout_seconds: float = Field(2.0, gt=0)
    """A cancelled sample is delivered after so long even if its instance has not answered."""
    claim_wait_seconds: float = Field(2.0, gt=0)
    """A sample that was moved to an instance to which there is no link yet is resumed by its prefix after so
    long."""
    refusal_pause_seconds: float = Field(0.1, gt=0)
    """An instance that refused is left alone for so long, doubling with each refusal in a row."""
    refusal_pause_most_seconds: float = Field(2.0, gt=0)
    """The longest such pause."""
    update_timeout_seconds: float = Field(600.0, gt=0)
    """A weight update that its trainer has not touched for so long is aborted."""
    stage_timeout_seconds: float = Field(300.0, gt=0)
    """Deadline of an instance for checking and staging weights."""
    apply_timeout_seconds: float = Field(60.0, gt=0)
    """Deadline of an instance for applying weights."""
