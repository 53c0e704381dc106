"""What people see of a run: metrics by the names they know, MLflow, the terminal."""
