"""Traces of torch.profiler: where the GPU's time went, what covers it, and which of it is worth a task."""
