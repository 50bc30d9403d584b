"""Foundation of all services: configuration, gRPC, Redis, observability, security and the life of a process."""
