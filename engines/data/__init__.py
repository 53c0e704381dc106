"""veRL-style data sets as prompts, and which prompts each RL step takes."""
