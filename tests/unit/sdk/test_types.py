"""What the SDK refuses before it is sent."""

import math
from typing import Any

import pytest

from paceline import Exactness, ExactnessLevel


def test_lenient_takes_an_l_or_a_target() -> None:
    fixed = Exactness.lenient(math.exp(0.5))
    assert fixed == Exactness(ExactnessLevel.LENIENT, math.exp(0.5))
    adaptive = Exactness.lenient(kl_target=0.01, reuse_delay=1, diversity_floor=0.3)
    assert adaptive == Exactness(ExactnessLevel.LENIENT, None, 1, 0.01, 0.3)
    assert Exactness.lenient(1.2, kl_target=0.01).lenience == 1.2


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"reuse_delay": 1},
        {"lenience": 0.5},
        {"lenience": math.inf},
        {"lenience": math.nan},
        {"lenience": 1.5, "reuse_delay": -1},
        {"kl_target": 0.0},
        {"kl_target": math.nan},
        {"lenience": 1.5, "diversity_floor": 0.0},
        {"lenience": 1.5, "diversity_floor": 1.5},
    ],
)
def test_lenient_refuses_what_the_service_would_refuse(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"lenience|reuse_delay|kl_target|diversity_floor"):
        Exactness.lenient(**wrong)
