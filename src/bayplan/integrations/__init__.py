"""One line each for transformers' Trainer, Lightning and Accelerate; see `docs/frameworks.md`.

Each framework is optional and is imported by its own module alone.
"""
