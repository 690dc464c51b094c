"""One form of a result: read, compared, verified and set beside published ones."""
