"""KV that moves between engines: the transfer and its connectors."""
