"""Noticing what is coming: signals, a file, what a cloud says of its machine. Nothing here acts on it."""
