"""Draft models that run inside the engine: EAGLE-3 heads and the quantized copy of the target."""
