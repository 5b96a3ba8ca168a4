"""The command ``resilient``."""
