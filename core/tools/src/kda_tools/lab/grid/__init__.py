"""`kda validate --record`: records which rows of a task's regression grid were checked on a GPU, and joins the runs."""
