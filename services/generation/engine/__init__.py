"""The engine of an instance. The only folder that imports vLLM or knows its names."""
