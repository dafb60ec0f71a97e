"""Campaigns: an agent works on one task in a loop that keeps its evidence."""
