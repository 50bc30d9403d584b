"""Attacks by who asks for what, and by what a request is made of: web pages, other tenants, odd bodies, probes."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.hostile.answers import CLOSED, Answer, Attack, Expected, either
from tests.hostile.http_sent import CHAT, COMPLETIONS, WAIT, Sent, each, encoded, sent
from tests.hostile.rig import ATTACKER, LOOKER, MOVER, SLOW, Rig, bearer, together
from tests.hostile.watching import TENANT
from tests.integration.facade.test_fuzz import BODIES

REFUSED = either(400)
ODD_BODIES: dict[str, bytes] = {
    "not a number": b'{"prompt": [1], "max_tokens": NaN}',
    "infinity": b'{"prompt": [1], "temperature": Infinity}',
    "1e999": b'{"prompt": [1], "temperature": 1e999}',
    "5,000 digits": b'{"prompt": [1], "max_tokens": ' + b"9" * 5000 + b"}",
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "the same name twice": b'{"prompt": [1], "max_tokens": 1, "max_tokens": -5}',
    "half a character as prompt": b'{"prompt": "\\ud800", "max_tokens": 1}',
    "half a character as stop": b'{"prompt": [1], "max_tokens": 1, "stop": "\\ud800"}',
    "half a character as request id": b'{"prompt": [1], "max_tokens": 1, "request_id": "\\ud800"}',
    "half a character in a name": b'{"prompt": [1], "max_tokens": 1, "\\ud800": 1}',
    "no JSON": b"\x00" * 1000,
    "a list": b"[]",
    "nothing": b"",
    "a number": b"1",
    "UTF-16": '{"prompt": [1]}'.encode("utf-16"),
}


def odd_bodies(_: int) -> Iterator[Sent]:
    """Yield each of them."""
    for body in ODD_BODIES.values():
        yield Sent(COMPLETIONS, body)


def ids_without_text(_: int) -> Iterator[Sent]:
    """Yield ids that the tokenizer does not have."""
    for wrong in (-1, 1 << 32, 10**30, 1000, 1.5, "1", None, True):
        yield sent("/detokenize", tokens=[1, wrong])


def odd_lengths(rig: Rig, _: int) -> list[Answer]:
    """Send lengths that are none, two of them, and a length beside chunks."""
    found = []
    for headers in (
        {"content-length": "-1"},
        {"content-length": "1_0"},
        {"content-length": "\u0661".encode().decode("latin-1")},
        {"content-length": str(100 << 20)},
        {"transfer-encoding": "chunked"},
        {"transfer-encoding": "chunked", "content-length": "5"},
    ):
        found += Sent(COMPLETIONS, method="POST", headers=headers)(rig)
    return found


CONTROL_PATHS = (
    "/pause",
    "/resume",
    "/continue_generation",
    "/pause_generation",
    "/flush_cache",
    "/reset_prefix_cache",
)
FOREIGN: tuple[dict[str, str], ...] = (
    {"origin": "http://evil.example"},
    {"origin": "null"},
    {"host": "evil.example"},
    {"host": "evil.example:7480"},
    {"host": "127.0.0.1.evil.example"},
    {"host": "localhost.evil.example"},
    {"origin": "http://localhost.evil.example"},
    {"host": "", "origin": "http://evil.example"},
    {"origin": "http://127.0.0.1:1", "sec-fetch-site": "cross-site"},
)
"""Headers of a browser that shows a page of somebody else's."""


def web_pages(_: int) -> Iterator[Sent]:
    """Yield what a web page can have a browser send to a facade that asks for no token."""
    for headers in FOREIGN:
        for path in CONTROL_PATHS:
            form = {"content-type": "application/x-www-form-urlencoded", **headers}
            yield Sent(path, b"", caller="", headers=form, facade="open-facade")
        yield Sent("/v1/models", None, "GET", "", headers, "open-facade")
        simple = {"content-type": "text/plain", **headers}
        yield Sent(COMPLETIONS, b'{"prompt": [1], "max_tokens": 1}', "POST", "", simple, "open-facade")


PATHS = (
    "/../etc/passwd",
    "/..%2f..%2fetc/passwd",
    "//etc/passwd",
    "/v1/models/../../paceline/v1/hint",
    "/v1%2fmodels",
    "/docs/../update_weights",
    "/health/..",
    "/livez/%2e%2e/pause",
    "/\\..\\..",
    "/v1/completions;a=b",
    "/openapi.json/",
)


def odd_paths(_: int) -> Iterator[Sent]:
    """Yield paths that lead elsewhere."""
    for path in PATHS:
        yield Sent(path, None, "GET", caller="")


def weights_from_elsewhere(_: int) -> Iterator[Sent]:
    """Yield folders that are none."""
    for folder in (
        "http://169.254.169.254/latest",
        "relative",
        "",
        "file:///etc",
        "/etc\0",
        "/nowhere/" + "x" * 70_000,
    ):
        yield sent("/update_weights_from_disk", MOVER, model_path=folder)
        yield sent("/update_weights", MOVER, weight_dir=folder)


def many_probes(rig: Rig, count: int) -> list[Answer]:
    """Probe very often, and return how many calls of the gateway that has cost, as one answer."""
    path = "paceline.v1.FleetService/ListInstances"
    began, before = time.monotonic(), rig.calls(path)
    for batch in range(0, count, 20):
        one = Sent("/health", None, "GET", caller="")
        together([partial(one, rig)] * min(20, count - batch))
    cost, seconds = rig.calls(path) - before, time.monotonic() - began
    # One a second, and those of another tenant meanwhile.
    allowed = 3 * (seconds + 2)
    within = cost <= allowed
    return [
        Answer("200" if within else f"{cost} calls", f"{count} probes in {seconds:.1f} s took {cost} calls")
    ]


def tokenizing_above_its_rate(rig: Rig, _: int) -> list[Answer]:
    """Tokenize twice with a token that may ask once in a long time; the second answer counts."""
    request = sent("/tokenize", SLOW, prompt="ab")
    request(rig)
    return request(rig)


def ending_others(path: str, **body: Any) -> Callable[[Rig, int], list[Answer]]:
    """Return what ends all requests while another tenant's runs, and returns how that one ended."""

    def send(rig: Rig, _: int) -> list[Answer]:
        asked = {
            "prompt": [1, 2, 3],
            "max_tokens": 400,
            "ignore_eos": True,
            "stream": True,
            "request_id": "of-alice",
        }
        host, _, port = rig.address("facade").rpartition(":")
        connection = http.client.HTTPConnection(host, int(port), timeout=WAIT)
        headers = {"content-type": "application/json", "x-paceline-run": f"{TENANT}-http", **bearer(TENANT)}
        connection.request("POST", COMPLETIONS, json.dumps(asked), headers)
        response = connection.getresponse()
        first = response.readline()
        answers = sent(path, **body)(rig)
        lines = [json.loads(line[6:]) for line in response if line.startswith(b"data: {")]
        connection.close()
        reasons = [choice["finish_reason"] for line in lines for choice in line.get("choices", ())]
        assert first.startswith(b"data: "), first
        ended = next((reason for reason in reasons if reason), "none")
        return [
            *answers,
            Answer("200" if ended == "length" else "499", f"another's request ended by {ended}"),
        ]

    return send


def in_anothers_run(_: int) -> Iterator[Sent]:
    """Yield requests in the name of another tenant's run."""
    for path, body in BODIES.items():
        if path in (
            "/v1/completions",
            CHAT,
            "/generate",
            "/generate/",
            "/inference/v1/generate",
            "/paceline/v1/hint",
            "/paceline/v1/rewards",
        ):
            yield Sent(path, partial(encoded, body), headers={"x-paceline-run": f"{TENANT}-run"})


def without_its_scope(_: int) -> Iterator[Sent]:
    """Yield requests of tokens without the scope, of a wrong one and of none."""
    for path, body in BODIES.items():
        updates = path in ("/pause_generation", "/update_weights", "/update_weights_from_disk")
        yield Sent(
            path,
            partial(encoded, body),
            caller=ATTACKER if updates else MOVER if "kenize" not in path else "nobody",
        )
        yield Sent(path, partial(encoded, body), caller="nobody")
        yield Sent(path, partial(encoded, body), caller="")
    yield Sent("/sleep", b"", caller=LOOKER)


NO_SUCH = Expected(frozenset(("400", "401", "403", "404", "405")))


ATTACKS: list[Attack] = [
    Attack("odd bodies", "H5", each(odd_bodies), either(200, 400)),
    Attack("ids that have no text", "H5", each(ids_without_text), REFUSED),
    Attack("odd lengths", "H5", odd_lengths, either(400, 411, 413, CLOSED, typed=False)),
    Attack("web pages", "H6", each(web_pages), either(400, 403, 421)),
    Attack("many probes", "H7", many_probes, either(200), short=100, whole=5000),
    Attack("odd paths", "S5", each(odd_paths), NO_SUCH),
    Attack("without its scope", "S5", each(without_its_scope), either(401, 403)),
    Attack("weights from elsewhere", "S5", each(weights_from_elsewhere), either(400)),
    Attack("tokenizing above its rate", "S10", tokenizing_above_its_rate, either(429)),
    Attack("aborting all", "S10", ending_others("/abort_request", abort_all=True), either(200, 403)),
    Attack(
        "aborting another's by its name",
        "S10",
        ending_others("/abort_request", rid="of-alice"),
        either(200, 403),
    ),
    Attack(
        "aborting another's by its list",
        "S10",
        ending_others("/abort_requests", request_ids=["of-alice"]),
        either(200, 403),
    ),
    Attack(
        "aborting another's in vLLM's path",
        "S10",
        ending_others("/inference/v1/abort_requests", request_ids=["of-alice"]),
        either(200, 403),
    ),
    Attack("in another's run", "S2", each(in_anothers_run), either(403)),
]
