"""Routes of each dialect: they read a body, have its samples generated, and answer."""
