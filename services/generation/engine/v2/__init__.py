"""vLLM's V2 model runner with coupled sampling and verification on the device."""
