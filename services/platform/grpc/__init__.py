"""gRPC servers and channels, with health, interceptors and reconnecting links."""
