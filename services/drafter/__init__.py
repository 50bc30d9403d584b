"""The drafter that is trained online: ReSpec's learner, which runs during generation."""
