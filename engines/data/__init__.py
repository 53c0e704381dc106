"""Read veRL-style data sets into prompts, and choose the prompts of each RL step."""
