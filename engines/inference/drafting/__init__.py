"""Draft tokens for a vLLM engine, from history, n-grams, a head or draft models that run ahead."""
