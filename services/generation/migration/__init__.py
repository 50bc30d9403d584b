"""Live migration of running samples between instances, with their KV."""
