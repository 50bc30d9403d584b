"""Attacks by the size of a request, and by how much work it is: to every route of the facade."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from tests.hostile.answers import Answer, Attack, either
from tests.hostile.http_sent import (
    CHAT,
    COMPLETIONS,
    Sent,
    caller_of,
    each,
    encoded,
    many,
    sent,
    sized,
    text_of,
)
from tests.hostile.rig import Rig, together
from tests.integration.facade.test_fuzz import BODIES
from tests.support.fake_instance import MAX_MODEL_LEN

MESSAGES = [{"role": "user", "content": "ab"}]
LIMIT_NAMED = ("max_model_len", str(MAX_MODEL_LEN), "max_message_bytes", "bytes", "characters", "most")
"""Words by which an answer names the limit that a request is above."""
REFUSED = either(400)
TOO_LONG = either(400, 413, 422, words=LIMIT_NAMED)
ENDED = either(400, 408, 413, 422, 429, 503, 504)
"""Of work that may begin, and is ended by its deadline or by a limit."""
LOOP = "{% for i in range(99999) %}"
FOREVER = LOOP * 3 + "{% endfor %}" * 3


def templates_everywhere(_: int) -> Iterator[Sent]:
    """Yield a template of the caller's own for every route that has a body."""
    for path, body in BODIES.items():
        caller = caller_of(path)
        yield sent(path, caller, **body, chat_template=FOREVER)


ARGUMENTS: dict[str, Any] = {
    "padding": "max_length",
    "max_length": 50_000_000,
    "return_tensors": "pt",
    "tokenize": True,
    "chat_template": FOREVER,
    "truncation": True,
    "return_dict": True,
    "tokenizer_kwargs": {"padding": "max_length"},
    "documents": [{}],
    "tools": [{}],
    "conversation": [],
    "self": 1,
}
"""Arguments of `apply_chat_template`."""


def arguments_as_variables(_: int) -> Iterator[Sent]:
    """Yield each of them as a variable of the template."""
    for name, value in ARGUMENTS.items():
        yield sent(CHAT, messages=MESSAGES, max_tokens=1, chat_template_kwargs={name: value})


def variables_that_are_none(_: int) -> Iterator[Sent]:
    """Yield names that the model's template does not read, with values that would cost something."""
    for name in ("not_of_the_template", "__class__", "cycler", "add_special_tokens", "range"):
        yield sent(CHAT, messages=MESSAGES, max_tokens=1, chat_template_kwargs={name: [[0] * 99] * 99})


def template_where_it_is_trusted(rig: Rig, count: int) -> list[Answer]:
    """Send templates that do not end to a facade that runs those of requests, and others beside them."""
    name = "trusting-facade"
    rig.start_facade(name, "--trust-request-chat-template", "--work-seconds=5")
    template = partial(encoded, {"messages": MESSAGES, "max_tokens": 1, "chat_template": FOREVER})
    endless = [partial(Sent(CHAT, template, facade=name), rig)] * count
    beside = Sent(COMPLETIONS, partial(encoded, {"prompt": "ab", "max_tokens": 1}), facade=name)
    return [*together([*endless, partial(beside, rig)]), *Sent("/livez", None, "GET", facade=name)(rig)]


def long_texts(size: int) -> Iterator[Sent]:
    """Yield a text of a size in every place where one is tokenized."""
    text = text_of(size)
    yield sent(COMPLETIONS, prompt=text, max_tokens=1)
    yield sent(COMPLETIONS, prompt=["ab", text], max_tokens=1)
    yield sent("/tokenize", prompt=text)
    yield sent("/generate", text=text, sampling_params={"max_new_tokens": 1})
    yield sent("/generate", text=["ab", text], sampling_params={"max_new_tokens": 1})
    yield sent("/generate/", prompts=[text], max_tokens=1)
    yield sent(CHAT, messages=[{"role": "user", "content": text}], max_tokens=1)
    yield sent(CHAT, messages=[{"role": "user", "content": [{"type": "text", "text": text}]}], max_tokens=1)
    yield sent("/paceline/v1/hint", step=1, prompts=[text], max_tokens=1)


def many_short_texts(count: int) -> Iterator[Sent]:
    """Yield very many texts that are short enough each, and more than one request may have."""
    texts = ["ab"] * count
    yield sent(COMPLETIONS, prompt=texts, max_tokens=1)
    yield sent("/generate", text=texts, sampling_params={"max_new_tokens": 1})
    yield sent("/generate/", prompts=texts, max_tokens=1)
    yield sent(CHAT, messages=MESSAGES * count, max_tokens=1)


def many_ids(count: int) -> Iterator[Sent]:
    """Yield very many token ids in every place where there may be any."""
    ids = [1] * count
    yield sent(COMPLETIONS, prompt=ids, max_tokens=1)
    yield sent("/generate", input_ids=ids, sampling_params={"max_new_tokens": 1})
    yield sent("/generate/", prompts=[ids], max_tokens=1)
    yield sent("/inference/v1/generate", token_ids=ids, sampling_params={"max_tokens": 1})
    yield sent("/detokenize", tokens=ids)
    yield sent("/paceline/v1/hint", step=1, prompts=[ids], max_tokens=1)
    yield sent(COMPLETIONS, prompt=[1], max_tokens=1, stop_token_ids=ids)
    yield sent(COMPLETIONS, prompt=[1], max_tokens=1, allowed_token_ids=ids)


def many_strings(count: int) -> Iterator[Sent]:
    """Yield very many strings where a few are meant."""
    words = ["ab"] * count
    yield sent(COMPLETIONS, prompt=[1], max_tokens=1, stop=words)
    yield sent("/abort_requests", request_ids=words)
    yield sent("/abort_request", rid="a" * count)
    yield sent("/paceline/v1/rewards", step=1, rewards=[{"prompt_id": "p", "slot": 0, "reward": 1.0}] * count)


def unknown_parameters(count: int) -> Iterator[Sent]:
    """Yield very many parameters that nobody knows, for every route."""
    more = {f"unknown_{number}": number for number in range(count)}
    for path, body in BODIES.items():
        caller = caller_of(path)
        yield sent(path, caller, **body, **more)


def deep(opening: str, closing: str = "") -> Callable[[int], Iterator[Sent]]:
    """Return what yields JSON that is nested so deep, as a body and in a parameter, for every route."""

    def make(depth: int) -> Iterator[Sent]:
        nested = opening * depth + closing * depth
        for path, body in BODIES.items():
            caller = caller_of(path)
            yield Sent(path, nested.encode(), caller=caller)
            whole = json.dumps(body)[:-1] + f',"unknown":{nested}}}'
            yield Sent(path, whole.encode(), caller=caller)

    return make


def deep_values(depth: int) -> Iterator[Sent]:
    """Yield JSON that is nested so deep in the places that have JSON of the caller's."""
    nested = "[" * depth + "]" * depth
    for place in (
        '"messages":[{"role":"user","content":%s}]',
        '"messages":[{"role":"user","content":"a","tool_calls":%s}]',
        '"messages":[{"role":"user","content":"a"}],"chat_template_kwargs":{"greeting":%s}',
        '"messages":[{"role":"user","content":"a"}],"response_format":{"type":"json_schema","json_schema":{"schema":%s}}',
        '"messages":[{"role":"user","content":"a"}],"structured_outputs":{"json":%s}',
    ):
        yield Sent(CHAT, ('{"max_tokens":1,' + place % nested + "}").encode())
    function = {"name": "f", "arguments": nested}
    calls = [{"type": "function", "id": "a", "function": function}]
    message = {"role": "assistant", "content": "a", "tool_calls": calls}
    yield sent(CHAT, messages=[message], max_tokens=1)
    yield sent(COMPLETIONS, prompt=[1], max_tokens=1, structured_outputs={"json": nested})


def legal_step(prompts: int) -> Sent:
    """Return a step of so many prompts of 400 ids, one token each."""
    return sent(
        COMPLETIONS, prompt=[[1 + number % 900] * 400 for number in range(prompts)], max_tokens=1, seed=1
    )


ATTACKS: list[Attack] = [
    Attack(
        "template of the caller's",
        "H1",
        sent(CHAT, messages=MESSAGES, max_tokens=1, chat_template=FOREVER),
        either(400, fields=("chat_template",)),
    ),
    Attack("template on every route", "H1", each(templates_everywhere), either(400)),
    Attack(
        "arguments as variables of the template",
        "H1",
        each(arguments_as_variables),
        either(400, fields=("chat_template_kwargs",)),
    ),
    Attack(
        "templates that do not end where they are trusted",
        "H1",
        template_where_it_is_trusted,
        either(200, 400, 429, 504),
        short=0,
        whole=6,
    ),
    Attack(
        "variables that the template does not read", "H1", each(variables_that_are_none), either(200, 400)
    ),
    Attack(
        "variable of 15 MB",
        "H1",
        sized(
            lambda size: sent(
                CHAT, messages=MESSAGES, max_tokens=1, chat_template_kwargs={"greeting": text_of(size)}
            )
        ),
        TOO_LONG,
        short=15_000_000,
        whole=15_000_000,
    ),
    Attack(
        "text of 2 MB",
        "H2",
        sized(lambda size: sent(COMPLETIONS, prompt=text_of(size), max_tokens=1)),
        TOO_LONG,
        short=0,
        whole=2_000_000,
    ),
    Attack(
        "text of 15 MB",
        "H2",
        sized(lambda size: sent(COMPLETIONS, prompt=text_of(size), max_tokens=1)),
        TOO_LONG,
        short=15_000_000,
        whole=15_000_000,
    ),
    Attack(
        "text of 8 MB to tokenize",
        "H2",
        sized(lambda size: sent("/tokenize", prompt=text_of(size))),
        TOO_LONG,
        short=0,
        whole=8_000_000,
    ),
    Attack("long texts in every place", "H2", each(long_texts), TOO_LONG, short=200_000, whole=15_000_000),
    Attack(
        "long texts at once",
        "H2",
        many(lambda size: sent(COMPLETIONS, prompt=text_of(size), max_tokens=1), 15_000_000),
        either(*TOO_LONG.statuses, 429, 503),
        short=0,
        whole=16,
    ),
    Attack(
        "bodies of 15 MB at once",
        "H2",
        many(lambda size: sent(COMPLETIONS, prompt=[[1] * 400] * (size // 1200), max_tokens=1), 15_000_000),
        either(*ENDED.statuses),
        short=0,
        whole=16,
    ),
    Attack(
        "bodies of 1 MB at once",
        "H2",
        many(lambda size: sent(COMPLETIONS, prompt=[1] * (size // 3), max_tokens=1), 1_000_000),
        either(*ENDED.statuses),
        short=8,
        whole=250,
    ),
    Attack("many short texts", "H2", each(many_short_texts), ENDED, short=5000, whole=1_500_000),
    Attack(
        "token ids",
        "H2",
        sized(lambda size: sent(COMPLETIONS, prompt=[1] * size, max_tokens=1)),
        TOO_LONG,
        short=1_000_000,
        whole=5_000_000,
    ),
    Attack(
        "token ids in every place",
        "H2",
        each(many_ids),
        either(200, 400, 413, 422),
        short=20000,
        whole=5_000_000,
    ),
    Attack(
        "strings in every place",
        "H2",
        each(many_strings),
        either(200, 400, 404, 413, 422),
        short=5000,
        whole=200_000,
    ),
    Attack(
        "unknown parameters",
        "H2",
        sized(
            lambda size: sent(
                COMPLETIONS, prompt=[1], max_tokens=1, **{f"unknown_{n}": n for n in range(size)}
            )
        ),
        ENDED,
        short=50_000,
        whole=500_000,
    ),
    Attack(
        "unknown parameters on every route", "H2", each(unknown_parameters), ENDED, short=200, whole=500_000
    ),
    Attack("step of many prompts", "F1", sized(legal_step), either(200, 400, 422), short=1050, whole=4096),
    Attack(
        "requests at once",
        "F1",
        many(lambda _: sent(COMPLETIONS, prompt=[1, 2], max_tokens=1), 1),
        either(200),
        short=50,
        whole=250,
    ),
    Attack(
        "samples of one prompt",
        "F1",
        sized(lambda n: sent(COMPLETIONS, prompt=[1, 2], max_tokens=1, n=n, seed=1)),
        either(200, 400),
        short=1050,
        whole=4096,
    ),
    Attack("lists nested deep", "H5", each(deep("[", "]")), REFUSED, short=100_000, whole=1_000_000),
    Attack("lists that do not end", "H5", each(deep("[")), REFUSED, short=100_000, whole=7_000_000),
    Attack("objects nested deep", "H5", each(deep('{"a":')), REFUSED, short=20_000, whole=2_000_000),
    Attack(
        "values nested deep", "H5", each(deep_values), either(200, 400, 422), short=10_000, whole=1_000_000
    ),
]
