"""What is known before a task begins: upstream's fused ops, the watchlist, skills and notes, and a search over all."""
