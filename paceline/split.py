"""Split a batch that is too large for one call into batches that are not. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from paceline import convert
from paceline import types as t
from paceline.channel import MAX_MESSAGE_BYTES

MAX_SAMPLES = 65_536
"""Most samples that a gateway accepts in one batch, unless it is set up for fewer."""
# Below the limit by what the fields beside the groups may take.
_MAX_BYTES = MAX_MESSAGE_BYTES - (1 << 16)
# The most that a token takes, and the other fields of a group without sampling parameters of its own.
_TOKEN_BYTES, _GROUP_BYTES = 5, 1100


def parts_of(batch: t.Batch, most_samples: int = MAX_SAMPLES, most_bytes: int = _MAX_BYTES) -> list[t.Batch]:
    """Return the batch, or batches that have its groups in order, with ids derived from its own.

    The same batch always has the same parts. Seeds depend on prompt and slot only, so a group is never split.
    """
    runs = list(runs_of(batch.groups, most_samples, most_bytes))
    if len(runs) == 1:
        return [batch]
    ids = [f"{batch.batch_id}.part{number}of{len(runs)}" for number in range(1, len(runs) + 1)]
    return [replace(batch, batch_id=name, groups=run) for name, run in zip(ids, runs, strict=True)]


def first_part(groups: Sequence[t.Group]) -> Sequence[t.Group]:
    """Return as many groups as fit into one message."""
    return next(runs_of(groups))


def runs_of(
    groups: Sequence[t.Group], most_samples: int = MAX_SAMPLES, most_bytes: int = _MAX_BYTES
) -> Iterator[Sequence[t.Group]]:
    """Yield consecutive groups that together are within the limits, as many as possible each time."""
    # Sizes are seldom needed, and to know them is to encode the groups.
    size_of = _least_effort if sum(map(_least_effort, groups)) <= most_bytes else _encoded
    begin = samples = size = 0
    for end, group in enumerate(groups):
        own = size_of(group)
        if end > begin and (samples + group.samples > most_samples or size + own > most_bytes):
            yield groups[begin:end]
            begin, samples, size = end, 0, 0
        samples += group.samples
        size += own
    yield groups[begin:]


def _least_effort(group: t.Group) -> int:
    """Return at least the bytes of a group in a request."""
    tokens = len(group.prompt_token_ids) + (len(group.sampling.stop_token_ids) if group.sampling else 0)
    return tokens * _TOKEN_BYTES + _GROUP_BYTES


def _encoded(group: t.Group) -> int:
    """Return the bytes of a group in a request, with the tag and the length before it."""
    return convert.group_to_proto(group).ByteSize() + 8
