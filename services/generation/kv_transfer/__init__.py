"""Transfer KV blocks between instances, over TCP or NIXL."""
