"""Predicting: simulations in virtual time over the real scheduler and router."""
