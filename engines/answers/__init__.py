"""Verifiable answers: extracted from a response and compared with the right one."""
