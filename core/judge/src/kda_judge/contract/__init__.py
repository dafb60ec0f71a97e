"""What a task says of itself: its contract, its rows, what its solution may import."""
