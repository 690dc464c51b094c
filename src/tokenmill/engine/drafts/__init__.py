"""Drafts of a multi-token prediction: who proposes them, how many pay, and which are taken."""
