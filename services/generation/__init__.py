"""One generation instance: a vLLM engine that this process steps itself, behind gRPC."""
