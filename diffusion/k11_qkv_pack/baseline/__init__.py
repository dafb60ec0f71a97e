"""The upstream arms: what the models of each release call one after the other, one module per release."""
