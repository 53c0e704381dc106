"""A process that runs vLLM: what is set before vLLM is imported, and what all of them share."""

import os
from collections.abc import AsyncIterator, Sequence
from typing import Any

from engines.inference.engine.plugin import PRIVATE_DIR
from engines.machine.cuda import works_on_cpu
from engines.private import use_private_kernels
from engines.shared_memory import PrivateDir, name_after

_ENGINE_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # Exact sampling is written against the V1 runner's batch.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


def prepare_process(
    tp_degree: int,
    devices: Sequence[int] = (),
    *,
    batch_invariant: bool = False,
    takes_handles: bool = False,
) -> bool:
    """Set what vLLM reads when it is imported; whether it will run on the CPU. Raises RuntimeError
    when it would have to, but was meant for GPUs.

    `devices`: GPUs of this node, one a rank; none: those that Ray has given. `batch_invariant`: see
    `RolloutConfig`. `takes_handles`: CUDA IPC handles come, as `HandOver` sends them.
    """
    os.environ.update(_ENGINE_ENV)
    if takes_handles:
        # They are pickled, and no further than from Ray to its own processes in its own directory.
        os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    _keep_temporary_files()
    if devices:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    on_cpu = works_on_cpu()
    if on_cpu:
        _share_cpu_cores(tp_degree)
    elif batch_invariant:
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
    return on_cpu


def _keep_temporary_files() -> None:
    """Have vLLM put its sockets and the like, and its processes their shared memory, where they go
    when this process does, however it ends; what is compiled stays for the next one."""
    use_private_kernels()
    directory = PrivateDir().path
    name_after(directory)
    os.environ |= dict.fromkeys(("TMPDIR", "VLLM_RPC_BASE_PATH", PRIVATE_DIR), str(directory))


def _share_cpu_cores(tp_degree: int) -> None:
    """One thread a process: engines share the cores, and vLLM's own binding would pin them all to
    the same ones (with TP it refuses a machine with one NUMA node)."""
    if tp_degree == 1:
        # Else the CPU platform puts the worker into a further process, which costs time each step.
        # `AsyncLLM` has its engine core in a process of its own all the same.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # vLLM's n-gram drafter uses numba, which would set OpenMP's threads to all cores: five times
    # slower with two engines on two cores.
    os.environ.setdefault("NUMBA_NUM_THREADS", "1")
    # It would overrule `rollout.kv_cache_bytes`.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)


def final_params(**params: Any) -> Any:
    """vLLM's `SamplingParams` of a request whose final output alone is wanted, if `params` say
    nothing else."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params.setdefault("output_kind", RequestOutputKind.FINAL_ONLY)
    # They are nobody else's, and are not copied part by part.
    return SamplingParams(detokenize=False, skip_clone=True, **params)


def outputs(llm: Any, name: str, token_ids: Sequence[int], **params: Any) -> AsyncIterator[Any]:
    """Outputs of a request to vLLM's `AsyncLLM`; `params` as in `final_params`."""
    from vllm.inputs import tokens_input

    return llm.generate(tokens_input(list(token_ids)), final_params(**params), name)


async def generate(llm: Any, name: str, token_ids: Sequence[int], **params: Any) -> Any:
    """The final output of a request."""
    async for output in outputs(llm, name, token_ids, **params):
        final = output
    return final


def submitted_as(id: str) -> str:
    """vLLM adds 8 random characters to the name of a request."""
    return id.rsplit("-", 1)[0]
