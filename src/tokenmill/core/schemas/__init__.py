"""JSON schemas as constraints: what a grammar can enforce of them, and what is left out."""
