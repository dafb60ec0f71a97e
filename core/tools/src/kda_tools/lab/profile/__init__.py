"""`kda profile`: Nsight Compute on the arms of one row, and the digest that is committed."""
