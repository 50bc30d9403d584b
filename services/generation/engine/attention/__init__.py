"""Attention backend for short queries, and the choice of kernels."""
