"""Language models in serving: start a server, load it, profile it, and say which kernels are worth a task."""
