"""Let vLLM schedule asynchronously on a CPU, as it does on a GPU, where `ASYNCHRONOUS` is 1."""

import os

ASYNCHRONOUS = "INTERPRETED_ASYNCHRONOUSLY"


def register() -> None:
    if os.environ.get(ASYNCHRONOUS) != "1":
        return
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config.__func__
    if check.__name__ == "asynchronously":
        return

    def asynchronously(cls, vllm_config) -> None:
        check(cls, vllm_config)
        speculation = vllm_config.speculative_config
        vllm_config.scheduler_config.async_scheduling = (
            speculation is None or speculation.method != "custom_class"
        )

    CpuPlatform.check_and_update_config = classmethod(asynchronously)
