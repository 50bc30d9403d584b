"""Keep batches, versions and lenience in Redis, where they outlive the gateway."""
