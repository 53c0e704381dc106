"""Placement: which prompts go to which engine, by the lengths of earlier epochs. Pure."""
