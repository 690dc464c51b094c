"""Engines of jobs: their protocol, and ranking requests as bytes."""
