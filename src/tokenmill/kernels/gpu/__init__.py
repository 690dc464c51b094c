"""Triton kernels. Each matches the torch reference of the same name one level up."""
