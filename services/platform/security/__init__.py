"""TLS certificates, bearer tokens, scopes and rate limits."""
