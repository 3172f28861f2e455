"""Deciding: does it fit, and if not, what would make it fit."""
