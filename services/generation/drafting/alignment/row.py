"""How a sample lies along a sequence that it follows: a row of integers, and what they mean."""

from __future__ import annotations

# Response position p is compared with the sequence's place p + OFFSET; BEGIN and LENGTH say where the sequence
# lies in the arena. SEEN response tokens were compared, and of the latest MATCHED matched in a row. SOURCE is the
# place of what results call the sequence's origin.
BEGIN, LENGTH, OFFSET, SEEN, MATCHED, SOURCE, FIELDS = range(7)
# Tokens that must match for a realignment, and how far from the current place it is looked for. Fewer tokens
# find places that only look alike; further away the text is about something else.
ANCHOR = 4
REACH = 64
# Of so many of the latest tokens it is counted at which place more of them matched.
LATEST = 8
# Matches in a row of a sequence that has never mismatched; a bucket of its own, and above all counts.
UNBROKEN = 1 << 40
