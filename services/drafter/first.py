"""Make a fresh drafter for a policy: `python -m services.drafter.first --model DIR --parent DIR`.

An instance only loads heads of the shape that it started with. So that it can start before anything was learned,
this writes a fresh head to `drafter-000001` under the parent and prints its path; the learner starts from the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from services.contracts.errors import ServiceError
from services.drafter.learning.data import LearningSettings


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit status: 1 if no EAGLE-3 head can be made for the policy."""
    parser = argparse.ArgumentParser(prog="python -m services.drafter.first", description=__doc__)
    parser.add_argument(
        "--model", type=Path, required=True, help="model folder of the policy, in Hugging Face layout"
    )
    parser.add_argument("--parent", type=Path, required=True, help="folder that gets drafter-000001")
    parser.add_argument("--draft-vocabulary", type=int, default=LearningSettings().draft_vocabulary)
    given = parser.parse_args(arguments)
    from services.drafter.learning.learner import Learner

    try:
        learner = Learner(given.model, LearningSettings(draft_vocabulary=given.draft_vocabulary))
        print(learner.save(given.parent.absolute(), 1).path)
    except (ServiceError, OSError, ValueError) as error:
        print(f"no drafter was made: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
