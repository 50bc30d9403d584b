"""Reports of ended samples and steps to the draft store, the learner and the decision log."""
