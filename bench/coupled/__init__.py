"""Compare coupled sampling and its drafters with plain vLLM."""
