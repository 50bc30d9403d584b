"""Images, as the repository's Dockerfile describes them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Image:
    """What an image gives its containers. `folder` is where they start."""

    environment: Mapping[str, str]
    entry: tuple[str, ...]
    folder: str


def image_of(dockerfile: str, target: str) -> Image:
    """Return what a target of a Dockerfile has, with what it is built on. KeyError: there is none."""
    stages: dict[str, Image] = {}
    stage = ""
    for line in re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", dockerfile, flags=re.MULTILINE)).splitlines():
        order, _, rest = line.partition(" ")
        if order == "FROM":
            parent, _, stage = rest.partition(" AS ")
            stages[stage] = stages.get(parent, Image({}, (), "/"))
        elif stage:
            stages[stage] = _with(stages[stage], order, rest.strip())
    return stages[target]


def _with(image: Image, order: str, rest: str) -> Image:
    if order == "ENV":
        added = dict(re.findall(r"(\w+)=(\S+)", rest))
        added = {name: value.replace(":$PATH", ":/usr/bin:/bin") for name, value in added.items()}
        return Image({**image.environment, **added}, image.entry, image.folder)
    if order == "ENTRYPOINT":
        return Image(image.environment, tuple(json.loads(rest)), image.folder)
    if order == "WORKDIR":
        return Image(image.environment, image.entry, rest)
    return image
