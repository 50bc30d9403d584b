"""Transports: connections to a gateway, and single attempts at calls."""
