"""The machine that this process is on: what it has, and whether a run can work with it."""
