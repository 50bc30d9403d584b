"""Hand finished samples and their rewards to the draft store and to the learner."""
