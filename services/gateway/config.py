"""Settings of the gateway."""

from pathlib import Path

from pydantic import Field

from services.platform.config import LeaderConfig, Port


class GatewayConfig(LeaderConfig):
    """Settings of the gateway, in addition to the settings of all services (services.platform.config)."""

    port: Port = 7400
    """Port of the gRPC server."""
    leader_host: str | None = None
    """Host at which other gateways reach this one while it leads, to forward calls to it. An example is the
    address of a pod, where all gateways share one `advertise_host`, the name in their certificate. Unset:
    `advertise_host`."""
    max_connection_age_seconds: float | None = Field(300.0, ge=1, allow_inf_nan=False)
    """Age at which a trainer is asked to connect again, so that it finds new gateways. Unset: never."""
    max_queued_samples: int = Field(262_144, ge=1)
    """Most unfinished samples over all batches; above it SubmitRollouts answers RESOURCE_EXHAUSTED."""
    max_batch_seconds: float = Field(14400.0, gt=0)
    """Longest deadline of a batch, and the deadline of a batch that names none."""
    open_batch_idle_seconds: float = Field(1800.0, gt=0)
    """Time after which an open batch is closed if no trainer reads it, adds to it, acknowledges samples of it or
    asks
    for its status. Its samples are still generated."""
    max_open_batch_samples: int = Field(65_536, ge=1)
    """Most samples of an open batch; beyond it AddSamples answers RESOURCE_EXHAUSTED."""
    max_calls: int = Field(1024, ge=1)
    """Most tool calls of a sample; a batch may set a lower limit."""
    call_wait_seconds: float = Field(600.0, gt=0)
    """Time after which a sample that has called a tool ends as ABORTED if its environment does not answer, unless
    its
    batch sets another time."""
    max_attempts: int = Field(16, ge=1)
    """Attempts in a row without a token after which a sample is FAILED."""
    room_factor: float = Field(1.25, gt=0)
    """Samples given to an instance, as a multiple of what it runs at once. Samples above 1 wait on the instance, so
    that the next one follows a finished one without a round trip."""
    affinity_slack: float = Field(1.0, ge=0)
    """Extra load, in lengths of the sample to be placed, up to which an instance with samples of the same prompt is
    preferred to the least loaded one."""
    history: bool = True
    """Store finished samples in the draft store, so that later epochs reuse them."""
    learner_feed: bool = True
    """Send finished samples and their rewards to the learner of the drafter, while there is one."""
    learner_feed_bytes: int = Field(128 * 1024 * 1024, ge=16 * 1024 * 1024)
    """Memory of that stream in Redis; above it the oldest entries are removed. The default holds 32 million tokens,
    eight times as many as the learner's replay buffer."""
    learner_linger_seconds: float = Field(120.0, ge=0)
    """Time for which the stream is still fed after the learner has gone, in case it returns."""
    max_hint_steps: int = Field(8, ge=1)
    """Coming steps of a run whose hints are kept. If more are hinted, the nearest are kept."""
    max_hint_bytes: int = Field(64 * 1024 * 1024, ge=1)
    """Memory for the hints of all runs; a hint that does not fit is refused."""
    draft_cost: float = Field(0.15, ge=0, le=1)
    """Cost of a drafted token, as a share of the cost of a generated one; used for placement only."""
    coverage_timeout_seconds: float = Field(0.1, gt=0)
    """Longest time that a submission waits for the list of the samples that are pre-generated for its step."""
    run_idle_seconds: float = Field(14400.0, gt=0)
    """Time after which a run without a batch or a hint is forgotten, together with its hints."""
    retention_seconds: float = Field(3600.0, ge=1)
    """Time for which a finished batch can be streamed before its trainer acknowledges it."""
    acknowledged_seconds: float = Field(600.0, ge=1)
    """Time for which a fully acknowledged batch is remembered, for its rewards."""
    journal_tokens: int = Field(1024, ge=1)
    """Tokens that an unfinished sample gains between two writes to the journal. Tokens that are not written are
    lost
    only with the gateway; its successor has them generated again."""
    max_result_bytes: int = Field(256 * 1024 * 1024, ge=0)
    """Memory for finished samples that are not acknowledged, to be written again if Redis loses them. Above it the
    oldest are dropped; if Redis loses those, they are generated again."""
    max_token_bytes: int = Field(2 * 1024 * 1024 * 1024, ge=1)
    """Memory for the tokens of samples that have not ended, 8 bytes each. Above it SubmitRollouts and Generate
    answer RESOURCE_EXHAUSTED; accepted samples continue. The default is 8,192 samples of 32,768 tokens, and half of
    the memory that the chart gives a gateway."""
    max_unwritten_bytes: int = Field(1024 * 1024 * 1024, ge=1)
    """Memory for finished samples that Redis does not accept. Above it instances get no samples and their
    messages are not read, until half of it is written. The default is 4,096 samples of 32,768 tokens, and a
    quarter of the memory that the chart gives a gateway."""
    max_redis_memory: float = Field(0.85, gt=0, le=1)
    """Share of Redis' `maxmemory` above which SubmitRollouts answers RESOURCE_EXHAUSTED."""
    registry_poll_seconds: float = Field(0.25, gt=0)
    """Interval between two reads of the registry."""
    handshake_timeout_seconds: float = Field(3.0, gt=0)
    """Deadline of short calls to instances."""
    abort_timeout_seconds: float = Field(2.0, gt=0)
    """Time after which a cancelled sample is delivered even if its instance has not answered."""
    claim_wait_seconds: float = Field(2.0, gt=0)
    """Time after which a sample is resumed by its prefix if it was moved to an instance without a link."""
    refusal_pause_seconds: float = Field(0.1, gt=0)
    """Time for which an instance gets no samples after it refused one; it doubles with each refusal in a row."""
    refusal_pause_most_seconds: float = Field(2.0, gt=0)
    """The longest such pause."""
    weights_root: Path | None = None
    """Folder that must contain the weights of an update. Unset: any folder."""
    update_timeout_seconds: float = Field(600.0, gt=0)
    """Time after which a weight update is aborted if its trainer does not call."""
    stage_timeout_seconds: float = Field(300.0, gt=0)
    """Deadline of an instance for checking and staging weights."""
    apply_timeout_seconds: float = Field(60.0, gt=0)
    """Deadline of an instance for applying weights."""
