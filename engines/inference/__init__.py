"""All code that touches vLLM: engines, sampling, drafting, KV cache, weights and profiling."""
