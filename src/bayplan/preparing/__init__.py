"""A step made ready: built once, traced, priced and cut into stages once for every question."""
