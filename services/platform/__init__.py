"""What every service shares: configuration, gRPC server and channel, errors, logs, metrics, registry."""
