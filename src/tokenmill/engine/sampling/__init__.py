"""From logits to tokens: sampling and grammars."""
