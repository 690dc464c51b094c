"""Servers whose workers answer jobs: what ranking and others have in common over HTTP."""
