"""Makes a fresh drafter for a policy: `python -m services.drafter.first --model DIR --parent DIR`.

Instances take heads of one shape only, the one that they are started with. So before there is anything to learn
from they are given a fresh head, and the learner goes on from the same one. Writes `drafter-000001` under the
parent and prints its path.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from services.drafter.learning.settings import LearningSettings
from services.platform.errors import ServiceError


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: 1 when the policy is none that an EAGLE-3 head can be made for."""
    parser = argparse.ArgumentParser(prog="python -m services.drafter.first", description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="the policy, in Hugging Face layout")
    parser.add_argument("--parent", type=Path, required=True, help="folder that the drafter is put into")
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
