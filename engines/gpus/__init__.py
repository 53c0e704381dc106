"""GPUs of a cluster: whose they are."""
