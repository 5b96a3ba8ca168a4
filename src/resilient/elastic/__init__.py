"""The agent's side: which nodes take part, who asks for what, and what belongs to a node rather than to a worker."""
