"""What workers take from each other: KV of prompts, and features of images."""
