"""Flows and commands: what a person starts. Read `train.py` and `step.py` first."""
