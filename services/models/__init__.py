"""Delivery of models: from the Hugging Face hub, object stores and web servers to a folder."""
