"""Fits the efficiencies of predictions to measured and published runs, and validates them."""
