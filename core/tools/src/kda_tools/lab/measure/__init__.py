"""What a GPU can do for kernels of this kind, measured: `kda doctor --measure`."""
