"""What stays in memory from step to step: KV blocks, who holds them, prefixes, images."""
