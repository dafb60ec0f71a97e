"""`kda sanitize`: compute-sanitizer on representative rows of a task."""
