"""OpenAI's requests and answers: decoding, preparing and formatting them."""
