"""KV blocks that left the device: in host memory, then on disk, and back."""
