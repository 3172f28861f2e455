"""What a device offers and what a step really takes from it."""
