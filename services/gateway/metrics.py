"""What the gateway tells Prometheus."""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.01, 0.05, 0.1, 0.5, 1, 5, 15, 60, 300, 900, 3600, 14400)
_JOURNAL_SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 2.5)


class GatewayMetrics:
    """All metrics of the gateway, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline_gateway_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"paceline_gateway_{name}", text, labels, registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
            return Histogram(f"paceline_gateway_{name}", text, labels, registry=registry, buckets=buckets)

        self.samples = counter("samples_total", "Samples ended, by status.", "status")
        self.tokens = counter("tokens_total", "Response tokens received from instances.", "instance")
        self.placements = counter("placements_total", "Samples given to instances.", "instance")
        self.refusals = counter("refusals_total", "Samples that instances refused.", "instance", "code")
        self.resubmissions = counter("resubmissions_total", "Samples resumed elsewhere, by cause.", "cause")
        self.losses = counter("instance_losses_total", "Instances lost.", "instance")
        self.queued = gauge("queued_samples", "Samples waiting for an instance.")
        self.running = gauge("running_samples", "Samples on an instance.", "instance")
        self.batches = gauge("batches", "Batches unfinished.")
        self.streams = gauge("streams", "Open StreamRollouts and Generate calls.")
        self.instances = gauge("instances", "Instances by state.", "state")
        self.policy_version = gauge("policy_version", "The published policy version.")
        self.leader = gauge("leader", "1 while this gateway holds the lease.")
        self.journal_errors = counter("journal_errors_total", "Journal round trips that failed.")
        self.journal_seconds = histogram("journal_seconds", "One journal round trip.", _JOURNAL_SECONDS)
        self.batch_seconds = histogram("batch_seconds", "Batches from acceptance to the end.", _SECONDS)
        self.queue_seconds = histogram("queue_seconds", "Samples from acceptance to placement.", _SECONDS)
        self.sample_tokens = histogram(
            "sample_tokens", "Response tokens of samples.", (16, 64, 256, 1024, 4096, 16384, 65536)
        )
        self.update_seconds = histogram("update_seconds", "Phases of weight updates.", _SECONDS, "phase")
        self.updates = counter("updates_total", "Weight updates, by outcome.", "outcome")
