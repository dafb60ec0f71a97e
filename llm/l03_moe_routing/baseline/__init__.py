"""The upstream arms, one module per release: two releases are both called `sglang`, so each has its own process."""
