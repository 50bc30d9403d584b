"""Acceptance probability of proposed tokens, learned online."""

from services.generation.speculation.acceptance.table import AcceptanceTable, warm_up

__all__ = ["AcceptanceTable", "warm_up"]
