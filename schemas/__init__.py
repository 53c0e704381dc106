"""Typed data that travels between phases. Imports only pydantic and the standard library."""
