"""Exact sampling: the noise is a pure function of sample key, position and token id."""
