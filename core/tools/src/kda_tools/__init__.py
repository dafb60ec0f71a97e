"""The `kda` command and everything around the judge: lab, publishing, project care."""

__version__ = "0.2.0"
