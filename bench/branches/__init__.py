"""Value of token trees over chains: how often further branches are right, and rollout time with them."""
