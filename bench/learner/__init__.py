"""Drafters that are trained while the policy is, against one that is not (ReSpec, Figures 4, 10 and 15)."""
