"""What a model is, read from its config: shapes, rotary positions, experts, quantization."""
