"""The ranking engine: requests to jagged batches, embedding stores, scores."""
