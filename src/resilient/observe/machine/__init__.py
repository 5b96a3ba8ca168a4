"""What a machine does while it trains: processors, links, accelerators."""
