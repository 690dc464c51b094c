"""Model files: where they lie, what is in them, and whether it fits the model."""
