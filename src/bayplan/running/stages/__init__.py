"""A training step cut into stages: what belongs where, and each stage as a step of its own."""
