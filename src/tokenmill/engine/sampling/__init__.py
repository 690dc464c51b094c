"""From logits to tokens: sampling, grammars and relaxed acceptance."""
