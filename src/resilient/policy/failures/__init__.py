"""What a failure was, by what it is known, and what to do about it: pure functions over what the ranks have left."""
