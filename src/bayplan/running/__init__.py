"""Running training for real, and recording what happened."""
