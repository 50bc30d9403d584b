"""Decide which running samples move to which instance. Everything here is pure: no clock and no I/O."""
