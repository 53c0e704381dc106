"""GPUs of a cluster: who has them, where, and when they are free again."""
