"""GSPO: one ratio for each sequence."""

from refrain.engines.learn.objectives.clipped import clipped_at
from refrain.engines.learn.objectives.ratios import sequence_log_ratios
from refrain.engines.learn.objectives.tokens import PolicyLosses, PolicyTokens
from refrain.schemas.algorithm import AlgorithmConfig


def gspo(tokens: PolicyTokens, algorithm: AlgorithmConfig) -> PolicyLosses:
    """Return PPO's losses with the ratio `s_i = (pi(y_i) / pi_old(y_i))^(1 / |y_i|)` at each token
    of sequence i (GSPO, arXiv:2507.18071, section 4.1, equation 7).

    `s_i,t = sg[s_i] pi(y_t) / sg[pi(y_t)]` (section 4.3, equation 14), as in veRL. With the
    aggregation `sequence_mean`, loss and gradient are those of equation 5, as long as all tokens of
    a response have the same weight. A deviation: |y_i| counts only the tokens that count, which are
    all tokens unless some are too old.
    """
    log_ratios = sequence_log_ratios(tokens.log_ratios, tokens.counted, tokens.num_tokens)
    return clipped_at(log_ratios, tokens, algorithm)
