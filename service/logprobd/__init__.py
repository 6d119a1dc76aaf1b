"""logprobd: per-token log-probabilities of given completions, over HTTP."""

__version__ = "0.1.0"
