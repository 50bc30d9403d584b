"""SmolLM2-135M-Instruct as a subject: a small language model that writes text."""
