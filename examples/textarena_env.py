"""A game of TextArena for one player, such as GuessTheNumber-v0.

    venvs/textarena/bin/python examples/textarena_env.py GuessTheNumber-v0 0 64 > data/guess.jsonl

writes prompts of the seeds 0 to 63. docs/adapters.md has all commands.
"""

import json
import random
import sys
import threading

import textarena

LOCK = threading.Lock()
"""Games draw from Python's global random numbers, so one game moves at a time."""


class TextArena:
    """One game. Its score is the reward that TextArena gives at the end."""

    def __init__(self, game):
        """`game`: TextArena's name of the game. Brackets are added to moves without any."""
        raw = textarena.make(f"{game}-raw")
        self.game = textarena.wrappers.ActionFormattingWrapper(raw)

    def reset(self, task):
        self.start(task.extra_info.get("seed", task.seed))

    def start(self, seed):
        """Start the game of a seed. Return its prompt."""
        self.numbers = random.Random(seed).getstate()
        return self.play(self.game.reset, 1, seed)

    def step(self, turn):
        """Return what the game says to a move, or its reward."""
        news = self.play(self.game.step, turn.text)
        return self.end("over") if self.game.state.done else news

    def play(self, move, *arguments):
        """Make a move with this game's own random numbers. Return the game's messages."""
        with LOCK:
            random.setstate(self.numbers)
            move(*arguments)
            _, messages = self.game.get_observation()
            self.numbers = random.getstate()
        return "\n".join(text for sender, text, _ in messages if sender == textarena.GAME_ID)

    def end(self, _reason):
        """Return the reward, which is 0 while the game goes on."""
        return float((self.game.state.rewards or {0: 0.0})[0])


def row_of(game, seed):
    """Return a row of a data set in veRL's format."""
    return {
        "data_source": f"textarena/{game}",
        "prompt": [{"role": "user", "content": TextArena(game).start(seed)}],
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {"seed": seed},
    }


if __name__ == "__main__":
    name, *seeds = sys.argv[1:]
    print("\n".join(json.dumps(row_of(name, seed)) for seed in range(*map(int, seeds))))
