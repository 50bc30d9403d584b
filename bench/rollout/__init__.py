"""The whole: one recorded training run, replayed by plain vLLM, vLLM's own methods, papers and Paceline."""
