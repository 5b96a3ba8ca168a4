"""Which checkpoints exist, and making one exist."""
