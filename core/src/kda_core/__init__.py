"""The shared core of KDA-Pilot: what must be the same for every kernel task."""

__version__ = "0.1.0"
