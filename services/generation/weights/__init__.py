"""Stage new weights in host memory until the engine applies them."""
