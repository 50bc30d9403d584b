"""Formats of the EAGLE-3 drafter that the learner publishes and instances load: record, checkpoint, Redis keys."""
