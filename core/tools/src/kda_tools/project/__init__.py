"""Maintain a checkout: new tasks, validation, schemas, and checks of what a machine lacks."""
