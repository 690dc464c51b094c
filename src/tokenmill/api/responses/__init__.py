"""OpenAI's Responses API over chat completions: items in, items and typed events out, a store."""
