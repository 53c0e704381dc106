"""Delivery of a run's record to MLflow and to files in its directory."""
