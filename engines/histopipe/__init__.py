"""Placement: assigns prompts to engines by the response lengths of earlier epochs. Pure."""
