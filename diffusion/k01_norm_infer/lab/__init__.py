"""Designs that are kept to be compared with the solution; nothing is dispatched to them."""
