"""Ranking over HTTP: POST /v1/rank."""
