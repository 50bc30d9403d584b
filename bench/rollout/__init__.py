"""Replay one recorded training run with plain vLLM, vLLM's own methods, the papers' systems and Paceline."""
