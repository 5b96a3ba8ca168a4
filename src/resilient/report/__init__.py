"""Where the time of a run went: from what its ranks have written down to what a person reads; without torch."""
