"""Files that only ports have: parts of the package that they share, and the arm of a ported tree."""

LEFT = "left to SGLang's own code"
"""Error text of a port's arm on a CPU, for a call that its kernels do not take."""
REFUSED = "refused by SGLang's own function"
"""Error text of a port's arm whose gate compares bits, for a call that SGLang's function cannot do."""
