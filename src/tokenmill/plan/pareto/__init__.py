"""Predicted throughput and price over interactivity for several GPUs, beside published points."""
