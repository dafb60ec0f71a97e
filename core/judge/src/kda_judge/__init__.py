"""What decides: contracts, arms in processes of their own, the oracle, the clocks, the verdicts and their records."""

__version__ = "0.2.0"
