"""Draft with a draft model: the quantized self-draft or an EAGLE-3 head."""
