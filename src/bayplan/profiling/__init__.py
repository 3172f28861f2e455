"""From a `StepGraph` to a `Profile`: measured here, or derived for a device that is not."""
