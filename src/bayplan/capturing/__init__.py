"""From a model, a batch and a loss to a `StepGraph`, without allocating a single tensor."""
