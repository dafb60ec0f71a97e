"""`kda validate --record`: which rows of a task's regression grid were checked on a GPU, by runs that are joined."""
