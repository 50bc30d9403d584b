"""Compare drafters that train along with the policy with a frozen one (ReSpec, Figures 4, 10 and 15)."""
