"""What processes of a user's code share: their guard, their environment and how they ended."""
