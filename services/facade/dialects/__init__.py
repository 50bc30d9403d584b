"""Request and response bodies of each dialect. Pure: bodies in, sample requests out, and back."""
