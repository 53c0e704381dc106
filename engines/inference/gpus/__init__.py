"""GPUs that engines of several layouts take turns on."""
