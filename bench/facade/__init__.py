"""Measure the overhead of the HTTP facade over gRPC."""
