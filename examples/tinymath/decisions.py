"""Watches the platform's decisions while a run goes on, and keeps them with its results.

with DecisionWatch(client) as watch:
    ...
    watch.wait_for(steps - 1)
save_decisions(folder / "decisions.json", watch.decisions)
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

from paceline import Client, Decision, PacelineError

STEP = "speculation"
"""Kind of the decision that sums up a step."""
_MOST_SHOWN = 400
_WAIT_SECONDS = 30.0


class DecisionWatch:
    """A thread that reads decisions, from `__enter__` to `__exit__`. It closes its client."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._decisions: list[Decision] = []
        self._changed = threading.Condition()
        self._since = time.time()
        self._thread = threading.Thread(target=self._watch, name="decision-watch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._thread.join()

    @property
    def decisions(self) -> list[Decision]:
        """All so far."""
        with self._changed:
            return list(self._decisions)

    def wait_for(self, step: int, seconds: float = _WAIT_SECONDS) -> None:
        """Return when a step has been summed up, or after so long: it may never be, without a policy service."""

        def known() -> bool:
            return any(each.kind == STEP and each.details.get("step") == step for each in self._decisions)

        with self._changed:
            self._changed.wait_for(known, seconds)

    def _watch(self) -> None:
        try:
            for decision in self._client.watch_decisions(since=self._since):
                with self._changed:
                    self._decisions.append(decision)
                    self._changed.notify_all()
        except (PacelineError, ValueError):
            return  # the client was closed, or the gateway is gone


def save_decisions(path: Path, decisions: Iterable[Decision]) -> None:
    """Write decisions, so that a report can be made again."""
    path.write_text(json.dumps([asdict(decision) for decision in decisions]))


def load_decisions(path: Path) -> list[Decision]:
    """Read what `save_decisions` wrote; none where there is no such file."""
    if not path.exists():
        return []
    return [Decision(**entry) for entry in json.loads(path.read_text())]


def decision_rows(decisions: Sequence[Decision], began: float) -> list[dict[str, str]]:
    """Lines of the report's table, in order of time; of very many the first are shown. `began`: unix seconds."""
    ordered = sorted(decisions, key=lambda each: each.time)[:_MOST_SHOWN]
    return [
        {
            "time": f"{each.time - began:.1f}",
            "kind": each.kind.replace("_", " "),
            "gain": f"{each.predicted_gain:+.0%}" if each.predicted_gain else "",
            "reason": each.reason,
            "drafts": _drafts(each.details),
        }
        for each in ordered
    ]


def _drafts(details: Mapping[str, Any]) -> str:
    """Describe accepted and drafted tokens, by origin."""
    drafts = details.get("drafts", {})
    if not isinstance(drafts, Mapping):
        return ""
    return ", ".join(
        f"{name} {accepted:.0f}/{drafted:.0f}" for name, (_, drafted, accepted) in drafts.items()
    )
