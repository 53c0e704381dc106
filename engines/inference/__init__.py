"""All contact with vLLM: engines, sampling, drafting, keys and values, weights, GPUs, profiling."""
