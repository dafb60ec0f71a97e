"""The upstream arm: SGLang has all three ops from one release on."""
