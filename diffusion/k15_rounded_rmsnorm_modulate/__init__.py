"""This task as a package: imports inside it are relative, so that a copied folder runs itself."""
