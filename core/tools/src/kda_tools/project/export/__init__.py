"""`kda export`: write a solution as a folder that works without this repository, and check that its bits are equal."""
