"""The HTTP server below the application: connections, their limits and their deadlines."""
