"""Training session: updates in a process of their own, and their durable state."""
