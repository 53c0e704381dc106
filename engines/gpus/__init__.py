"""Ownership of a cluster's GPUs: placement, sharing in turn, and freeing after a death."""
