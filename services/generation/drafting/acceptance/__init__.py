"""How likely an offered token is kept, learned while decoding."""

from services.generation.drafting.acceptance.table import AcceptanceTable, warm_up

__all__ = ["AcceptanceTable", "warm_up"]
