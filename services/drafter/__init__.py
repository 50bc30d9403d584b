"""The drafter that is trained online: ReSpec's learner beside generation."""
