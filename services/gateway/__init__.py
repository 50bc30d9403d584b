"""Gateway: accepts batches of rollouts, places their samples on instances, and delivers each once."""
