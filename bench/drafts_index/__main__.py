"""The suffix index beside arctic-inference's suffix cache, in one run: `python -m bench.drafts_index`.

Speed and memory: a million cached tokens over a thousand prompts, made-up texts of repeated phrases; 64 samples
of 8 of the prompts run, and each step appends 3 tokens to each and asks for 8. Acceptance: rollouts of the
tinymath model at temperature 1, half of each prompt's cached and the others replayed: what matches of an offer is
accepted, and the sample goes on behind it and one more token.

The other side is measured if `arctic_inference.suffix_decoding` can be imported (PYTHONPATH), else its figures are
null. In acceptance it is given what suits it best: prompts in front of the responses or not, limits or none.
"""

from __future__ import annotations

import argparse
import json

from bench.drafts_index.comparison import measure
from bench.drafts_index.speed import measure_resident
from bench.report import show, write


def main() -> None:
    """Measure, print, and write runs/bench/drafts_index.json."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--resident", help="only print the resident bytes a token: ours, or arctic's depth")
    options = parser.parse_args()
    if options.resident:
        print(json.dumps(measure_resident(options.resident)))
        return
    figures = measure()
    show("suffix index", figures)
    write("drafts_index", figures)


if __name__ == "__main__":
    main()
