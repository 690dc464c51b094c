"""The vocabulary that all packages share: types, configs, specs and metrics."""
