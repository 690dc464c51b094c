"""Secrets of a server: API keys as digests, and the folder where its user finds its token."""
