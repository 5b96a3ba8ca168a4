"""Node tiers: the newest states in memory or on disks of the nodes, which survive the processes that made them."""
