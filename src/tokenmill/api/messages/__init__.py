"""Anthropic's Messages API over chat completions: content blocks in, blocks and events out."""
