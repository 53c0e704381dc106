"""Typed data that travels between phases. Pydantic and the standard library only."""
