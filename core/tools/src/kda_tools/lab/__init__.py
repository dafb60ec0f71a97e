"""Looking into kernels: compiling, tuning, profiling, sanitizing, grids, the PTX machine, and arms that cheat."""
