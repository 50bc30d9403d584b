"""Health of instances and phases of weight updates, as pure state machines."""
