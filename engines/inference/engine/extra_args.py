"""Keys of `SamplingParams.extra_args`: what vLLM does not know of a request."""

SAMPLE_KEY = "sample_key"
"""Key of the request's noise."""
PROMPT_KEY = "prompt_key"
"""Key of its prompt."""
DRAFTING = "drafting"
"""Fields of its `DraftSetting`, if it has one."""
