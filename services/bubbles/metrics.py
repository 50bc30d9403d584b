"""Prometheus metrics of the bubble coordinator."""

from __future__ import annotations

from services.bubbles.ledger import BubbleLedger
from services.platform.observability.metric_set import MetricSet, counter, gauge


class BubbleMetrics(MetricSet, prefix="paceline_bubbles_"):
    """All metrics of the coordinator."""

    leases = counter(
        "leases_total",
        "Leases by event: leased; finished; returned; revoked (no longer wanted); expired (instance "
        "silent or gone); replaced (instance restarted); unknown (the instance does not know it).",
        "event",
    )
    tokens = counter("pregenerated_tokens_total", "Tokens pre-generated, as instances report.")
    running = gauge("leased_tasks", "Pre-generation tasks that instances have.")
    open = gauge("open_tasks", "Pre-generation tasks that are not finished.")
    runs = gauge("runs", "Runs known.")
    instances = gauge("instances", "Instances that share the work.")
    polls = gauge("held_polls", "Polls that are held back for lack of work.")

    def count(self, ledger: BubbleLedger) -> None:
        """Count the events of leases since the last call."""
        tally, ledger.tally = ledger.tally, type(ledger.tally)()
        self.tokens.inc(tally.pop("tokens", 0))
        for event, count in tally.items():
            self.leases.labels(event).inc(count)

    def show(self, ledger: BubbleLedger, now: float) -> None:
        """Publish the state of the ledger."""
        pools = [pool for run in ledger.runs.values() for pool in run.pools.values() if pool.wanted]
        self.running.set(sum(pool.leased for pool in pools))
        self.open.set(sum(pool.open for pool in pools))
        self.runs.set(len(ledger.runs))
        self.instances.set(ledger.members(now))
