"""Draft tokens for a vLLM engine: from history, n-grams and draft models that run ahead."""
