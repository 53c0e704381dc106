"""One controller that weighs all moves of a rollout phase against each other."""
