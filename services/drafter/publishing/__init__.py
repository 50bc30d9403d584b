"""Publishing of drafters: gate, record, loading by instances, canary and rollback."""
