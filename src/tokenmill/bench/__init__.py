"""Measuring: workloads, ceilings, and what each benchmark runs."""
