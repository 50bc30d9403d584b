"""Speculative decoding: drafter interface, acceptance estimates, and the plan of a step."""
