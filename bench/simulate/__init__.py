"""Simulations of whole clusters: capacity, and the papers' tables beside what is simulated of them."""
