"""Record a run: send its metrics to MLflow and write its progress to files."""
