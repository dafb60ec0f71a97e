"""`kda export`: a solution as a folder that works without this repository, and proof that its bits are the same."""
