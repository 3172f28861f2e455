"""Showing people what a verdict, a profile or a record says."""
