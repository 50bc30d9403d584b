"""Row of integers that describes the alignment of a sample to its reference."""

from __future__ import annotations

# Response position p is compared with place p + OFFSET of the reference, which has LENGTH tokens from BEGIN of
# the arena. SEEN response tokens were compared, and the latest MATCHED of them matched in a row. SOURCE is the
# place of the reference's source in the drafter's list.
BEGIN, LENGTH, OFFSET, SEEN, MATCHED, SOURCE, FIELDS = range(7)
# Tokens that must match for a re-alignment, and its largest distance from the current place. Fewer tokens match by
# chance, and more distant text is about something else.
ANCHOR = 4
REACH = 64
# Number of latest tokens by which candidate places are compared.
LATEST = 8
# Matches in a row of a reference that has never mismatched: above all counts, in a separate bucket.
UNBROKEN = 1 << 40
