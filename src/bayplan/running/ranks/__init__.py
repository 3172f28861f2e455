"""Ranks of one run: how they are started on one machine, and how they watch each other."""
