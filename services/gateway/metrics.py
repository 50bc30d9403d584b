"""Prometheus metrics of the gateway."""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence

from google.rpc import code_pb2
from prometheus_client import CollectorRegistry

from paceline.times import STEP_PARTS
from services.platform.observability.event_loop import TurnSelector
from services.platform.observability.metrics import MetricSet, counter, gauge, histogram

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400)
_JOURNAL_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5)
_TOKENS = (16, 64, 256, 1024, 4096, 16384, 65536)
_LEVELS = ("exact", "coupled_history", "lenient", "rejection")
_MOST_RUNS = 1000
"""Most runs that are shown; a further run replaces the one without changes for longest."""
_MOST_GONE = 1000
"""Instances whose counters stay after they have left the fleet, so that the last increase is scraped."""
_RUN_GAUGES = ("step", "lenience", "reward", "reported_kl", "reported_clip_fraction")


class GatewayMetrics(MetricSet, prefix="paceline_gateway_"):
    """All metrics of the gateway.

    The label of an instance is `instance_id`, because Prometheus uses `instance` for the scraped process.
    """

    # Samples
    samples = counter(
        "samples_total",
        "Samples ended, by status.",
        "status",
        values=("completed", "truncated", "aborted", "failed"),
    )
    expired = counter("expired_samples_total", "Samples ended by their batch's deadline.")
    stale_samples = counter(
        "stale_samples_total",
        "Unfinished samples over the max_staleness of their batch, by outcome.",
        "outcome",
        values=("regenerated", "aborted"),
    )
    tokens = counter("tokens_total", "Response tokens that instances have reported.", "instance_id")
    placements = counter("placements_total", "Samples given to instances.", "instance_id")
    refusals = counter("refusals_total", "Samples that instances refused.", "instance_id", "code")
    resubmissions = counter(
        "resubmissions_total",
        "Samples resumed elsewhere, by cause.",
        "cause",
        values=("lost", "handed_over", "moved", "journal"),
    )
    moves = counter(
        "moves_total",
        "Samples moved by instances: claimed; by_prefix, as requested; refused (the claim), no_link, no_place "
        "or tokens_missing, and resumed by their prefix anywhere; unwanted (ended or cancelled meanwhile).",
        "outcome",
        values=("claimed", "by_prefix"),
    )
    calls = counter("calls_total", "Tool calls of samples.")
    call_seconds = histogram("call_seconds", "Time from a sample's call to its answer.", _SECONDS)
    abandoned_calls = counter("abandoned_calls_total", "Samples that waited too long for their environments.")
    calling = gauge("calling_samples", "Samples waiting for their environments.")
    queued = gauge("queued_samples", "Samples waiting for an instance.")
    running = gauge("running_samples", "Samples on an instance.", "instance_id")
    queue_seconds = histogram("queue_seconds", "Samples from acceptance to placement.", _SECONDS)
    sample_tokens = histogram("sample_tokens", "Response tokens of samples.", _TOKENS)

    # Tokens, by the names that they have in tokens_file
    grant_samples = gauge("grant_unfinished_samples", "Unfinished samples of a token.", "grant")
    grant_tokens = gauge(
        "grant_unfinished_tokens", "Most tokens that these may come to: prompt and max_tokens.", "grant"
    )

    # Instances
    losses = counter("instance_losses_total", "Instances lost.", "instance_id")
    instance_up = gauge("instance_up", "0 for a lost instance, else 1.", "instance_id")
    instances = gauge("instances", "Instances by state.", "state")

    # Batches and the journal
    batches = gauge("batches", "Batches unfinished.")
    oldest_batch = gauge(
        "oldest_batch_timestamp_seconds",
        "Unix time at which the oldest unfinished batch, open ones left out, was accepted or closed; 0: none.",
    )
    closed_batches = counter(
        "closed_batches_total",
        "Open batches closed by the gateway: idle (unused by trainers) or at their deadline.",
        "cause",
        values=("idle", "deadline"),
    )
    batch_seconds = histogram("batch_seconds", "Batches from acceptance to the end.", _SECONDS)
    streams = gauge("streams", "Open StreamRollouts and Generate calls.")
    leader = gauge("leader", "1 while this gateway holds the lease.")
    journal_errors = counter("journal_errors_total", "Journal round trips that failed.")
    journal_seconds = histogram("journal_seconds", "One journal round trip.", _JOURNAL_SECONDS)
    journal_chunks = counter("journal_chunks_total", "Chunks of unfinished samples journaled.")
    journal_holes = counter(
        "journal_holes_total",
        "Writes that found less in Redis than it had acknowledged: hole (samples of a batch), gone (a batch), "
        "torn (chunks of a sample).",
        "kind",
        values=("hole", "gone", "torn"),
    )
    unwritten = gauge("unwritten_ratio", "Bytes of unwritten finished samples, over max_unwritten_bytes.")
    unfinished_tokens = gauge(
        "unfinished_tokens_ratio", "Bytes of unfinished samples' tokens, over max_token_bytes."
    )
    paused = gauge(
        "paused", "1 while too many bytes are unwritten: instances get no samples and are not read."
    )
    redis_memory = gauge("redis_memory_ratio", "Used memory of Redis over its maxmemory; 0: no limit.")

    # Reuse of cached rollouts by the samples of batches that were completed or truncated
    whole_samples = counter("whole_samples_total", "Samples completed or truncated.", "level", values=_LEVELS)
    whole_tokens = counter(
        "whole_sample_tokens_total",
        "Response tokens of completed or truncated samples.",
        "level",
        values=_LEVELS,
    )
    cached_samples = counter(
        "cached_samples_total",
        "Completed or truncated samples with a cached rollout.",
        "level",
        values=_LEVELS,
    )
    cached_tokens = counter(
        "cached_tokens_total", "Tokens of the cached rollouts of these samples.", "level", values=_LEVELS
    )
    reused_tokens = counter(
        "reused_prefix_tokens_total",
        "Response tokens before the first that differs from the cached rollout.",
        "level",
        values=_LEVELS,
    )
    fully_reused = counter(
        "fully_reused_samples_total",
        "Samples whose tokens are all the cached rollout's.",
        "level",
        values=_LEVELS,
    )

    # Runs; a run without changes for long is removed
    step = gauge("step", "The run's step that began last.", "run")
    lenience = gauge("lenience", "The l of the run's last LENIENT batch.", "run")
    reward = gauge("reward", "Mean of the rewards last reported.", "run")
    reported_kl = gauge("reported_kl", "KL of the policy and the sampling one, as last reported.", "run")
    reported_clip_fraction = gauge(
        "reported_clip_fraction", "Share of tokens with a clipped ratio, as last reported.", "run"
    )

    # Steps that are over, and hints of coming ones
    hints = counter(
        "hints_total", "Hints of coming steps: kept, or not because late, far ahead or no room.", "outcome"
    )
    hinted = gauge("hinted_samples", "Announced samples of coming steps.")
    step_seconds = histogram(
        "step_seconds", "Steps from the first sample's acceptance to the last one's end.", _SECONDS
    )
    step_parts = counter(
        "step_part_seconds_total",
        "Time of a step's last sample by part: queue, prefill, plain, verified, moves, between; before the "
        "step: trainer, weights.",
        "part",
        values=(*STEP_PARTS, "trainer", "weights"),
    )
    bubble_seconds = histogram(
        "bubble_seconds",
        "Idle time of an instance from its last sample of a step to the step's end.",
        _SECONDS,
    )
    bubble_average = gauge("step_bubble_average_seconds", "Mean bubble of the instances in the last step.")
    bubble_most = gauge("step_bubble_max_seconds", "Largest bubble of an instance in the last step.")
    pregenerated = counter("pregenerated_tokens_total", "Pre-generated tokens of steps when they began.")
    announced = counter("announced_step_tokens_total", "Response tokens of announced steps.")
    unannounced = counter(
        "unannounced_steps_total",
        "Steps that were not announced, such as a run's first; counted when they are over.",
    )
    coverage = gauge("step_coverage_ratio", "Pre-generated over real tokens of the last announced step.")

    # Finished samples on their way to other services
    history = counter(
        "history_rollouts_total",
        "Finished samples for the draft store: stored; not_stored (refused, or lost in an outage); dropped "
        "(the store did not keep up).",
        "outcome",
    )
    learner_feed = counter(
        "learner_feed_entries_total",
        "Finished samples and rewards for the learner: fed; refused by Redis; dropped (Redis did not keep up); "
        "trimmed unread, above the stream's bound.",
        "outcome",
        values=("fed", "refused", "dropped", "trimmed"),
    )

    # Event loop, since the port was opened
    longest_turn = gauge(
        "longest_turn_seconds", "Longest turn of the event loop, in processor time of its thread."
    )
    longest_turn_wall = gauge("longest_turn_wall_seconds", "Longest turn of the event loop, in wall time.")

    # Weights
    policy_version = gauge("policy_version", "The published policy version.")
    update_seconds = histogram("update_seconds", "Phases of weight updates.", _SECONDS, "phase")
    updates = counter(
        "updates_total",
        "Weight updates: published; aborted by the trainer; failed; abandoned by a silent trainer.",
        "outcome",
        values=("published", "aborted", "failed", "abandoned"),
    )
    in_flight_samples = counter(
        "in_flight_samples_total",
        "Samples unfinished when weights were applied: aborted; continued.",
        "outcome",
        values=("aborted", "continued"),
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        # Run id -> seconds of the last change of its gauges, the latest last.
        self._shown_at: OrderedDict[str, float] = OrderedDict()
        # Ids of instances that have left, the latest last. Ids of a Deployment's pods never return.
        self._gone: OrderedDict[str, None] = OrderedDict()

    def watch_turns(self, turns: TurnSelector) -> None:
        """Export the longest turn of an event loop from now on."""
        turns.longest_cpu = turns.longest_wall = 0.0
        self.longest_turn.set_function(lambda: turns.longest_cpu)
        self.longest_turn_wall.set_function(lambda: turns.longest_wall)

    def refused(self, instance_id: str, code: int) -> None:
        """Count a sample that an instance refused with this google.rpc.Code."""
        known = code in code_pb2.Code.values()
        self.refusals.labels(instance_id, code_pb2.Code.Name(code) if known else str(code)).inc()

    def show_instances(self, up: dict[str, bool], gone: Collection[str]) -> None:
        """Export which instances are up, and remove the series of instances that are gone.

        Their gauges are removed at once, their counters after `_MOST_GONE` others have left.
        """
        for instance_id, alive in up.items():
            self.instance_up.labels(instance_id).set(alive)
            self._gone.pop(instance_id, None)
        for instance_id in gone:
            self.instance_up.remove(instance_id)
            self.running.remove(instance_id)
            self._gone[instance_id] = None
        while len(self._gone) > _MOST_GONE:
            oldest, _ = self._gone.popitem(last=False)
            for counted in (self.tokens, self.placements, self.refusals, self.losses):
                counted.remove_by_labels({"instance_id": oldest})

    def show_run(self, run_id: str, now: float, **values: float) -> None:
        """Set gauges of a run, by their names. `now` is in seconds of any one clock."""
        self._shown_at[run_id] = now
        self._shown_at.move_to_end(run_id)
        if len(self._shown_at) > _MOST_RUNS:
            self._hide_run(next(iter(self._shown_at)))
        for name, value in values.items():
            getattr(self, name).labels(run_id).set(value)

    def forget_runs(self, before: float) -> None:
        """Remove the gauges of the runs without a change since `before`."""
        for run_id in [run_id for run_id, at in self._shown_at.items() if at < before]:
            self._hide_run(run_id)

    def _hide_run(self, run_id: str) -> None:
        del self._shown_at[run_id]
        for name in _RUN_GAUGES:
            getattr(self, name).remove(run_id)

    def count_whole(self, level: str, tokens: int, cached: int, reused: int) -> None:
        """Count a sample of a batch that was completed or truncated.

        It has `tokens` tokens; its cached rollout has `cached` tokens (0: none), and it shares the first `reused`.
        """
        self.whole_samples.labels(level).inc()
        self.whole_tokens.labels(level).inc(tokens)
        if cached:
            self.cached_samples.labels(level).inc()
            self.cached_tokens.labels(level).inc(cached)
            self.reused_tokens.labels(level).inc(reused)
            self.fully_reused.labels(level).inc(reused == tokens)

    def step_over(
        self,
        seconds: float,
        parts: Mapping[str, float],
        bubbles: Sequence[float],
        tokens: int,
        pregenerated: int | None,
    ) -> None:
        """Record a step: its duration and the seconds of its parts, the idle seconds of its instances, its tokens.

        `pregenerated` of the tokens existed when it began; None: it was not hinted.
        """
        self.step_seconds.observe(seconds)
        for part, spent in parts.items():
            self.step_parts.labels(part).inc(spent)
        for seconds in bubbles:
            self.bubble_seconds.observe(seconds)
        if bubbles:
            self.bubble_average.set(sum(bubbles) / len(bubbles))
            self.bubble_most.set(max(bubbles))
        if pregenerated is None:
            self.unannounced.inc()
        else:
            self.pregenerated.inc(pregenerated)
            self.announced.inc(tokens)
            self.coverage.set(pregenerated / tokens if tokens else 0.0)
