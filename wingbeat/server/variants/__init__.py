"""Several versions of an agent at once."""
