"""What a run leaves behind: records, their statistics, where they came from, and what the machine did meanwhile."""
