"""The `kda` command and everything around the judge: lab, publishing, project maintenance."""

__version__ = "0.2.0"
