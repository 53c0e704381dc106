"""Rollout engines, exact sampling and the coordinator. The only package that touches vLLM.

coordinator ── Engine (interface.py) ──┬── RayEngine (ray_engine.py): bounded calls to an actor
                                       │      └── VLLMEngine (vllm_engine.py): AsyncLLM
                                       └── any other engine, e.g. one in virtual time
in every vLLM worker process: worker.py installs the samplers of sampling.py, whose noise is
exact.py's; weight_transfer.py receives weights. profilers.py measures engines (profiling.py).
"""
