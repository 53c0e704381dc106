"""An environment of SkyRL-gym, such as gsm8k_multi_turn. It takes rows in veRL's format.

    refrain train CONFIG environment.path=examples/skyrl_gym_env.py \
        'environment.kwargs={id: gsm8k_multi_turn}' environment.python=venvs/skyrl/bin/python \
        reward.type=environment
"""

import skyrl_gym
from omegaconf import DictConfig


class SkyRL:
    """One episode. Its score is the sum of its turns' rewards."""

    def __init__(self, id, **config):
        """`id`: name that the environment is registered under. `config`: its `env_config`."""
        self.id, self.config = id, DictConfig(config)

    def reset(self, task):
        spec = {"method": "rule", "ground_truth": task.ground_truth}
        extras = {**task.extra_info, "reward_spec": spec, "extra_info": task.extra_info}
        self.env = skyrl_gym.make(self.id, env_config=self.config, extras=extras)
        self.env.init([])  # The policy has read the prompt already.
        self.total = 0.0

    def step(self, turn):
        """Return the environment's messages and the turn's reward, or the whole reward."""
        answer = self.env.step(turn.text)
        self.total += answer["reward"]
        if answer["done"]:
            return self.total
        return {"messages": answer["observations"], "score": answer["reward"]}

    def end(self, _reason):
        return self.total

    def close(self):
        self.env.close()
