"""Reward stage: compute a score for each response, or raise an error that names the response.

driver: ScorerPool -> RewardActor (pool.py) -> Scorer (scorer.py)
    -> the user's function or a built-in one (engines/answers), in processes that can be killed
       (process.py, worker.py, results.py)
"""

from refrain.engines.reward.metrics import sample_figures
from refrain.engines.reward.pool import ScorerHangs, ScorerPool
from refrain.engines.reward.scorer import check_ground_truth, check_reward, check_reward_file

__all__ = [
    "ScorerHangs",
    "ScorerPool",
    "check_ground_truth",
    "check_reward",
    "check_reward_file",
    "sample_figures",
]
