"""A live run: its directory, its actors and its records. The tasks work on it."""
