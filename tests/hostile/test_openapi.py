"""Requests that schemathesis makes up by the facade's own description of its API: `pip install '.[soak]'`."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.hostile.rig import EVERYTHING, Rig, bearer
from tests.hostile.watching import DEADLINE
from tests.support.soak import Progress, record

EXAMPLES = 150
"""Requests of each operation, of either kind."""
WAITING = ("/pause", "/pause_generation")
"""What lets all other requests wait."""
FORMS = ("message", "type", "param", "code")


def fault_of(response: Any) -> str:
    """Return what is wrong with an answer; empty if nothing is."""
    if response.status_code >= 500 and response.status_code not in (501, 503, 504):
        return f"status {response.status_code}"
    if not response.headers.get("x-request-id"):
        return "no x-request-id"
    if response.status_code < 400:
        return ""
    # One answer is plain text, as SGLang has it.
    if response.request.path_url.startswith("/flush_cache"):
        return ""
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        return f"an error that is none in JSON: {response.text[:200]}"
    lacking = [name for name in FORMS if name not in error]
    return f"an error without {', '.join(lacking)}" if lacking else ""


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_every_operation_of_the_api_answers_in_its_form(rig: Rig) -> None:
    reason = "schemathesis is not installed: pip install '.[soak]'"
    schemathesis = pytest.importorskip("schemathesis", reason=reason)
    url = f"http://{rig.address('facade')}"
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    operations = [each.ok() for each in schema.get_all_operations()]
    operations = [each for each in operations if each.path not in WAITING]
    progress = Progress("schemathesis", len(operations), "operation")
    statuses: dict[str, Counter[str]] = {}
    faults: dict[str, str] = {}
    rig.restore()
    with rig.watched() as (witness, meter):
        for number, operation in enumerate(operations):
            progress.tell(number, operation.label)
            counted = statuses[operation.label] = Counter()
            for mode in schemathesis.GenerationMode:
                _send(operation, mode, url, counted, faults)
    record("schemathesis", {"statuses": statuses, "faults": faults, "slowest_seconds": witness.slowest})
    assert not [*faults.items(), *witness.faults, *rig.memory_faults(meter)]


def _send(operation: Any, mode: Any, url: str, counted: Counter[str], faults: dict[str, str]) -> None:
    """Send the requests of one kind, and note the first that is not answered as it should be."""

    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
    @given(operation.as_strategy(generation_mode=mode))
    def send(case: Any) -> None:
        response = case.call(base_url=url, headers=bearer(EVERYTHING), timeout=DEADLINE)
        counted[str(response.status_code)] += 1
        if fault := fault_of(response):
            faults.setdefault(f"{operation.label}: {fault}", case.as_curl_command()[:1000])

    try:
        send()
    except Exception as error:
        # Such as an operation of which nothing can be wrong, so that there is nothing to send.
        if "Unsatisfiable" not in type(error).__name__:
            faults.setdefault(f"{operation.label}: {type(error).__name__}", str(error)[:1000])
