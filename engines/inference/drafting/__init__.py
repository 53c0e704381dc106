"""Draft tokens for a vLLM engine, from history, n-grams or draft models that run ahead."""
