"""The reference models: our own definitions of the networks that every claim is measured on.

Importing this package does not import torch; `load` does, when a builder is asked for.
"""

from bayplan.models.registry import (
    default_batch_size,
    is_target,
    load,
    load_with,
    options,
    reference_models,
)

__all__ = ["default_batch_size", "is_target", "load", "load_with", "options", "reference_models"]
