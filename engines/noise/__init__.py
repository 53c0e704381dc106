"""Latency models for every decision: fitted from a profile, or computed from a data sheet. Pure."""
