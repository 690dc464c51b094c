"""Who runs where: the router, the KV index and the balance of ranks and experts."""
