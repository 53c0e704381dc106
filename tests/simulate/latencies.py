"""Latencies for tests: straight lines, from what the papers print and from memory bandwidth."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LinearLatency:
    """A decoding step takes `step_s + sequence_s * batch + token_s * context_tokens`."""

    step_s: float = 0.01
    sequence_s: float = 0.0
    token_s: float = 0.0
    prefill_token_s: float = 0.0
    prefill_step_s: float = 0.01

    def decode_s(self, tp_degree: int, batch: int, context_tokens: float) -> float:
        assert tp_degree > 0
        return self.step_s + self.sequence_s * batch + self.token_s * context_tokens

    def prefill_s(self, tp_degree: int, batch: int, rms_tokens: float) -> float:
        assert tp_degree > 0
        return self.prefill_step_s + self.prefill_token_s * batch * rms_tokens

    def verify_s(self, tp_degree: int, batch: int, context_tokens: float, window: int) -> float:
        return self.decode_s(tp_degree, batch, context_tokens) * (1 + 0.01 * window)

    def draft_s(self, drafter: str, batch: int, window: int) -> float:
        return 0.001 * window if drafter else 0.0 * batch


PAT_A40_TP2 = LinearLatency(
    # PAT section 3.1 and Fig. 4: LLaMA3.1-8B, TP 2 on A40: 15.37 ms for one sequence, 24.41 ms at
    # a global batch of 128, which is 32 on each of the 4 engines of 8 GPUs.
    step_s=15.37e-3 - (24.41e-3 - 15.37e-3) / 31,
    sequence_s=(24.41e-3 - 15.37e-3) / 31,
    # KV cache: 32 layers * 2 * 8 heads * 128 * 2 bytes over 2 GPUs of 696 GB/s.
    token_s=131072 / (2 * 696e9),
    # 2 * 8e9 FLOP a token over 2 GPUs at half of 150 TFLOP/s.
    prefill_token_s=2 * 8e9 / (2 * 75e12),
)
RHYMERL_14B_TP2 = LinearLatency(
    # Qwen3-14B (Table 3): 29.5 GB of weights over 2 Hopper GPUs of 3.35 TB/s, and as much again
    # for kernels and collectives.
    step_s=2 * 29.5e9 / (2 * 3.35e12),
    sequence_s=2 * 14.8e9 / (2 * 500e12),
    token_s=40 * 2 * 8 * 128 * 2 / (2 * 3.35e12),
    prefill_token_s=2 * 14.8e9 / (2 * 500e12),
)
SPECACTOR_32B_TP4 = LinearLatency(
    # SpecActor section 5.1: below 13 ms with one request per worker. Qwen2.5-32B, 64 layers, 8 KV
    # heads, on 4 Hopper GPUs of 3.35 TB/s.
    step_s=12.5e-3,
    sequence_s=2 * 32.5e9 / (4 * 500e12),
    token_s=64 * 2 * 8 * 128 * 2 / (4 * 3.35e12),
    prefill_token_s=2 * 32.5e9 / (4 * 500e12),
)
