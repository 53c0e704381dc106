"""Figures of a step: metrics, requests on engines, and the seconds that techniques saved."""
