"""Redis: connection, leases, leadership, the service registry and the decision log."""
