"""KV cache events as vLLM and SGLang publish them: their format, and the index that they feed."""
