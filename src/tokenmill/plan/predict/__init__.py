"""Predicting throughput and latency of a model on GPUs from rooflines, lengths and queues."""
