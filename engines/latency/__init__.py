"""One latency model for every decision: fitted from profiles, or from a data sheet. Pure."""
