"""The commands of `tokenmill plan`."""
