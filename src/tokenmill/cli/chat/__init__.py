"""Conversations in the terminal, with a model of this process or a server."""
