"""Serve the gRPC services of the gateway."""
