"""Results as pages, charts and tables."""
