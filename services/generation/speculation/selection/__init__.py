"""Selection of the proposed tokens that a step verifies, compiled."""
