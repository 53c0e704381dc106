"""Flows and commands that a user starts. Read `train.py` and `step.py` first."""
