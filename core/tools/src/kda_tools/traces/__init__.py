"""Read traces of torch.profiler: where the GPU's time went, what already covers it, and what is worth a task."""
