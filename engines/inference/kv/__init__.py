"""Keys and values of a request that leaves one engine for another."""
