"""Set up a process that runs vLLM, and helpers that all these processes share."""

import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from refrain.engines.inference.engine.plugin import PRIVATE_DIR
from refrain.engines.machine.cuda import works_on_cpu
from refrain.engines.private import use_private_kernels
from refrain.engines.shared_memory import PrivateDir, name_after

_ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
V2_NEEDS_GPU = (
    "rollout.model_runner: v2 needs a GPU, because it is written in Triton; on a CPU use v1"
)


def prepare_process(
    tp_degree: int,
    devices: Sequence[int] = (),
    *,
    model_runner: str = "v1",
    batch_invariant: bool = False,
    takes_handles: bool = False,
) -> bool:
    """Set the environment that vLLM reads when it is imported. Return whether it uses the CPU.

    Raise RuntimeError if vLLM would have to use the CPU although it was meant for GPUs.

    Args:
        tp_degree: tensor-parallel degree of the engine.
        devices: GPUs of this node, one per rank. Empty: the GPUs that Ray has assigned.
        model_runner: see `RolloutConfig`.
        batch_invariant: see `RolloutConfig`.
        takes_handles: whether `HandOver` will send CUDA IPC handles to this process.
    """
    os.environ.update(_ENGINE_ENV)
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(model_runner == "v2"))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    if takes_handles:
        # vLLM pickles the handles. They only travel from Ray to this engine's own processes,
        # through sockets in its private directory.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    _keep_temporary_files()
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    on_cpu = works_on_cpu()
    if on_cpu:
        if model_runner == "v2" and os.environ.get("TRITON_INTERPRET") != "1":
            raise RuntimeError(V2_NEEDS_GPU)
        _share_cpu_cores(tp_degree)
    elif batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    return on_cpu


def _keep_temporary_files() -> None:
    """Let vLLM keep sockets, temporary files and shared memory in a directory that dies with us.

    The directory goes away however this process ends. Compiled kernels stay for later processes.
    """
    use_private_kernels()
    directory = PrivateDir().path
    name_after(directory)
    os.environ |= dict.fromkeys(("TMPDIR", "VLLM_RPC_BASE_PATH", PRIVATE_DIR), str(directory))


def _share_cpu_cores(tp_degree: int) -> None:
    """Use one thread per process and no core binding, because engines share the cores.

    vLLM's binding would pin all engines to the same cores. With TP it refuses a machine with one
    NUMA node.
    """
    if tp_degree == 1:
        # Otherwise vLLM on a CPU runs the worker in one more process, which slows each step.
        # `AsyncLLM` still has its engine core in a process of its own.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # vLLM's n-gram drafter uses numba, which would let OpenMP use all cores. With two engines on
    # two cores that is five times slower.
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    # This variable would override `rollout.kv_cache_bytes`.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def final_params(**params: Any) -> Any:
    """Return vLLM's `SamplingParams`. By default the request reports only its final output."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params.setdefault("output_kind", RequestOutputKind.FINAL_ONLY)
    # `skip_clone`: nobody else uses these parameters, so vLLM need not copy them.
    return SamplingParams(detokenize=False, skip_clone=True, **params)


def outputs(llm: Any, name: str, token_ids: Sequence[int], **params: Any) -> AsyncIterator[Any]:
    """Iterate over the outputs of a request to vLLM's `AsyncLLM`. `params`: see `final_params`."""
    from vllm.inputs import tokens_input

    return llm.generate(tokens_input(list(token_ids)), final_params(**params), name)


async def generate(llm: Any, name: str, token_ids: Sequence[int], **params: Any) -> Any:
    """Return the final output of a request."""
    async for output in outputs(llm, name, token_ids, **params):
        final = output
    return final


def submitted_as(id: str) -> str:
    """Return the name that a request was submitted with: vLLM appends 8 random characters."""
    return id.rsplit("-", 1)[0]
