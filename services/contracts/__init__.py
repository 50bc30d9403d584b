"""Formats and vocabularies that services share: seeds, sampling, rollouts, knobs, checkpoints, errors."""
