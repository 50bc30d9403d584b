"""Which tokens of offers are verified, compiled."""

from services.generation.drafting.selection.selection import (
    Chosen,
    Line,
    Rated,
    best_picks,
    flaw,
    least_row,
    longest,
    survivals,
    warm_up,
)

__all__ = ["Chosen", "Line", "Rated", "best_picks", "flaw", "least_row", "longest", "survivals", "warm_up"]
