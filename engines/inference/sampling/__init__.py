"""Exact sampling: noise that is a pure function of sample, position and token."""
