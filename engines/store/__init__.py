"""One DuckDB file per run: rollouts, rewards, plans and steps. A single process owns it."""
