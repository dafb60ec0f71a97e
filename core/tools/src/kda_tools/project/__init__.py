"""Care of a checkout: new tasks, validation, schemas, what a machine lacks."""
