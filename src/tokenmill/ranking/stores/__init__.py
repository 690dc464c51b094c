"""Embedding stores: where the rows of a table lie, and how they come to the device."""
