"""Checkpoints that torch.distributed.checkpoint wrote itself, read safely and without torch."""
