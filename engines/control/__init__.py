"""A controller that compares all moves of a generation stage with each other."""
