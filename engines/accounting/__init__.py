"""Figures of a step: metrics, where its requests were, and the seconds that techniques saved."""
