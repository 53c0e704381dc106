"""Environments: what happens between two turns of a policy."""
