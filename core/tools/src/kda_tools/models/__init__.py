"""Whole models: a step of SGLang's own classes, and the solutions in a framework that is installed."""
