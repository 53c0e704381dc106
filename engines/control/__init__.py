"""One controller that weighs all moves of a generation stage against each other."""
