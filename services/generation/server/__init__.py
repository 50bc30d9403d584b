"""The gRPC services of an instance, and the instance itself."""
