"""The language engine: the step loop, the runner and what it is built from."""
