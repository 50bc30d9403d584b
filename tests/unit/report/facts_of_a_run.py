"""Entries of the decision log as services write them, made by their own code."""

from __future__ import annotations

from collections.abc import Iterator

from paceline import Decision
from services.bubbles.service import FilledSpan, filled_records
from services.contracts.knobs import Acceptance, StepTotals
from services.gateway.api.reports import RewardBook
from services.gateway.feeds.step_report import IdleTimeBook, TimedSample, step_record
from services.gateway.instances.updater import update_record
from services.gateway.state.sample import GatewaySample, GenerationSpan
from services.platform.redis.decision_log import DecisionRecord
from services.policy.steps import StepEnd, step_ended

BEGIN = 1_700_000_000.0


def entry(record: DecisionRecord) -> Decision:
    """Return what a client reads of an entry."""
    fields = record.to_fields()
    stored = DecisionRecord.from_fields({name.encode(): value.encode() for name, value in fields.items()})
    return Decision(
        stored.time, stored.kind, stored.reason, stored.predicted_gain, stored.details, stored.run_id
    )


def run_entries(steps: int = 3, instances: int = 3, samples: int = 12, run: str = "run") -> list[Decision]:
    """Return all entries of a run: each step has one of each kind that a report reads, and one move."""
    return [entry(record) for number in range(steps) for record in _step(number, instances, samples, run)]


def _step(number: int, instances: int, samples: int, run: str) -> Iterator[DecisionRecord]:
    begin, book, report = BEGIN + 10 * number, IdleTimeBook(), None
    book.begin(run, number, samples, begin)
    for place in range(samples):
        end = begin + 1 + 5 * place / samples
        name = f"instance-{place % instances}"
        spans = [GenerationSpan(name, 0, 5, begin + 0.1, end)]
        if place == samples - 1:
            spans = [
                GenerationSpan(name, 0, 3, begin + 0.1, begin + 2),
                GenerationSpan("instance-0", 3, 5, begin + 2, end),
            ]
        sample = GatewaySample(place, 0, place, 1, spans=spans, first_step_at=begin + 0.2, decode_steps=5)
        sample.generation_seconds, sample.prefill_seconds = end - begin - 0.5, 0.1
        sample.verify_seconds, sample.plain_seconds, sample.verify_steps = 0.4, 0.2, 2
        ended = TimedSample(sample, "a <prompt> & more", 5, begin, end)
        report = book.end(run, number, ended)
    assert report is not None
    bubbles = report.bubbles([f"instance-{place}" for place in range(instances)])
    yield DecisionRecord("migration", "one is above", 0.2, _move(instances), begin + 2)
    yield step_record(report, bubbles, number)
    yield from filled_records([FilledSpan("instance-0", begin + 5, begin + 7)])
    yield update_record({"started": begin + 8}, number + 1, run, begin + 9)
    rewards: list[DecisionRecord] = []
    book_of_rewards = RewardBook(rewards.append)
    book_of_rewards.add(run, number, [0.0, 1.0, 0.5 + number / 100])
    book_of_rewards.write()
    yield from rewards
    drafts = {
        "suffix": Acceptance(10, 30, 12, (0, 0, 0, 10), (2, 4, 4)),
        "eagle3": Acceptance(4, 4, 4, (0, 4), (0, 4)),
    }
    totals = StepTotals(predicted_seconds=1.0 + number, measured_seconds=1.5, drafts=drafts, mode="planner")
    totals.reasons.update({"drafts": 9, "within_margin": 1})
    yield step_ended(StepEnd(run, number, totals, instances), begin + 9.5)


def _move(instances: int) -> dict[str, object]:
    return {"donor": f"instance-{instances - 1}", "receiver": "instance-0", "samples": 1, "rule": "threshold"}
