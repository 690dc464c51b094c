"""`tokenmill route`: the router in front of other servers."""
