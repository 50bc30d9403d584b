"""Settings of the gateway."""

from pathlib import Path

from pydantic import Field

from services.platform.config import LeaderConfig


class GatewayConfig(LeaderConfig):
    """Settings of the gateway; services.platform.config has those of all services."""

    port: int = 7400
    """Port of the gRPC server."""
    leader_host: str | None = None
    """Host at which other gateways reach this one while it leads, to pass calls on to it: say, the address of a pod
    whose `advertise_host`, the name in its certificate, is that of all gateways. Unset: `advertise_host`."""
    max_connection_age_seconds: float | None = Field(300.0, ge=1, allow_inf_nan=False)
    """Age at which a trainer is asked to connect again, so that it finds gateways that are new. Unset: never."""
    max_queued_samples: int = Field(262_144, ge=1)
    """Most unfinished samples over all batches; above it SubmitRollouts answers RESOURCE_EXHAUSTED."""
    max_batch_seconds: float = Field(14400.0, gt=0)
    """Longest deadline of a batch, and the deadline of one that names none."""
    open_batch_idle_seconds: float = Field(1800.0, gt=0)
    """An open batch that no trainer has read, added to, acknowledged or looked at for so long is closed. Its
    samples are generated all the same."""
    max_open_batch_samples: int = Field(65_536, ge=1)
    """Most samples of an open batch; beyond it AddSamples answers RESOURCE_EXHAUSTED."""
    max_calls: int = Field(1024, ge=1)
    """Most tool calls of a sample; a batch may have its samples make fewer."""
    call_wait_seconds: float = Field(600.0, gt=0)
    """A sample that has called a tool and gets nothing from its environment for so long ends as ABORTED, unless its
    batch says how long it waits."""
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
    learner_feed_bytes: int = Field(128 * 1024 * 1024, ge=16 * 1024 * 1024)
    """Memory of that stream in Redis, of which the oldest entries are lost above it. The default is 32 million
    tokens, eight times what the learner's replay buffer holds."""
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
    retention_seconds: float = Field(3600.0, ge=1)
    """How long a finished batch can still be streamed that its trainer has not acknowledged."""
    acknowledged_seconds: float = Field(600.0, ge=1)
    """How long a batch is remembered, for its rewards, once all of it is acknowledged."""
    journal_tokens: int = Field(1024, ge=1)
    """Tokens by which an unfinished sample grows before the journal is written again. Only the end of a gateway
    costs what is not written: its successor has those tokens generated again."""
    max_result_bytes: int = Field(256 * 1024 * 1024, ge=0)
    """Memory for finished samples until they are acknowledged, to be written again if Redis loses them. Of more,
    the oldest are dropped: if Redis loses those, they are generated again."""
    max_token_bytes: int = Field(2 * 1024 * 1024 * 1024, ge=1)
    """Memory for the tokens of samples that have not ended, 8 bytes each. Above it SubmitRollouts and Generate
    answer RESOURCE_EXHAUSTED; samples that were accepted go on. The default is 8,192 samples of 32,768 tokens, and
    half of the memory that the chart gives a gateway."""
    max_unwritten_bytes: int = Field(1024 * 1024 * 1024, ge=1)
    """Memory for finished samples that Redis does not take. Above it instances get no more samples and are not
    listened to, until half of it is written. The default is 4,096 samples of 32,768 tokens, and a quarter of the
    memory that the chart gives a gateway."""
    max_redis_memory: float = Field(0.85, gt=0, le=1)
    """Share of Redis' `maxmemory` above which SubmitRollouts answers RESOURCE_EXHAUSTED."""
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
    weights_root: Path | None = None
    """Folder that the weights of an update must be in. Unset: they may be in any."""
    update_timeout_seconds: float = Field(600.0, gt=0)
    """A weight update that its trainer has not touched for so long is aborted."""
    stage_timeout_seconds: float = Field(300.0, gt=0)
    """Deadline of an instance for checking and staging weights."""
    apply_timeout_seconds: float = Field(60.0, gt=0)
    """Deadline of an instance for applying weights."""
