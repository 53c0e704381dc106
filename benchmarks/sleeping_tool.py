"""An environment of `refrain bench tools`: it has a tool whose seconds are known."""

import asyncio
import random


class SleepingTool:
    """Answers each turn after a while. The turn after the last answer ends the conversation."""

    def reset(self, task):
        """Start with the task's seconds."""
        self.waits_s = list(task.extra_info["waits_s"])
        self.length = task.extra_info["observation_characters"]
        self.random = random.Random(task.seed)

    async def step(self, _turn):
        """Return some digits, or the score."""
        if not self.waits_s:
            return 1.0
        await asyncio.sleep(self.waits_s.pop(0))
        return "".join(self.random.choices("0123456789", k=self.length))
