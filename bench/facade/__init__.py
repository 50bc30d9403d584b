"""Overhead of the HTTP facade against gRPC."""
