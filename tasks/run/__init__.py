"""The run that tasks work on: its directory, its actors, what they share."""
