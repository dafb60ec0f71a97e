"""What a solution needs at run time besides torch and triton."""

__version__ = "0.2.0"
