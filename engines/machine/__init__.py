"""Inspect this machine's hardware and software, and check that a run fits on it."""
