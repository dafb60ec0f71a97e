"""Knowledge for the start of a task: upstream's fused ops, the watchlist, skills and notes, and searches over them."""
