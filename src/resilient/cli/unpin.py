"""``resilient unpin``: lives beside its counterpart."""

from resilient.cli.pin import unpin

__all__ = ["unpin"]
