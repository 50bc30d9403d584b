"""What the coordinator tells Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

from services.bubbles.ledger import Ledger


class BubbleMetrics:
    """All metrics of the coordinator, in one registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"paceline_bubbles_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"paceline_bubbles_{name}", text, registry=registry)

        self.leases = counter(
            "leases_total",
            "Leases by event: leased; finished; returned; revoked (no longer wanted); expired (instance "
            "silent or gone); replaced (instance restarted); unknown (the instance never heard of it).",
            "event",
        )
        self.tokens = counter("pregenerated_tokens_total", "Tokens pre-generated, as instances report.")
        self.running = gauge("leased_items", "Samples that instances have leased.")
        self.open = gauge("open_items", "Samples of coming steps that are not pre-generated to their end.")
        self.runs = gauge("runs", "Runs known.")
        self.instances = gauge("instances", "Instances that share the work.")
        self.polls = gauge("held_polls", "Polls that are held back for lack of work.")

    def show(self, ledger: Ledger, now: float) -> None:
        """Takes over the ledger's tally and where it stands."""
        tally, ledger.tally = ledger.tally, type(ledger.tally)()
        self.tokens.inc(tally.pop("tokens", 0))
        for event, count in tally.items():
            self.leases.labels(event).inc(count)
        pools = [pool for run in ledger.runs.values() for pool in run.pools.values() if pool.wanted]
        self.running.set(sum(pool.leased for pool in pools))
        self.open.set(sum(pool.open for pool in pools))
        self.runs.set(len(ledger.runs))
        self.instances.set(ledger.members(now))
