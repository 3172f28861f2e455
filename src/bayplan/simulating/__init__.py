"""Replaying a step without running it."""
