"""Arms in processes of their own: the protocol, the worker, shared memory, and pinned upstream files."""
