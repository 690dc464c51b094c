"""Text in and out: tokenizer, chat templates, tools, reasoning and detokenisation."""
