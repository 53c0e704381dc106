"""Move the keys and values of a request from one engine to another."""
