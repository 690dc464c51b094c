"""Long bodies of calls, read by processes of their own."""
