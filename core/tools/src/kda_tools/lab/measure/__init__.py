"""`kda doctor --measure`: measures what a GPU can do for kernels of this kind."""
