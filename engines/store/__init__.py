"""The store of a run: rollouts, rewards, plans and steps in a DuckDB file that one process owns."""
