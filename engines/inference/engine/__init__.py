"""A vLLM engine in a process of its own, behind `engines.rollout.interface`."""
