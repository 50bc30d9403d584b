"""HTTP facade of the gateway, in the dialects of vLLM (and OpenAI) and of SGLang."""
