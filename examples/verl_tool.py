"""A tool class written for veRL as an environment. `Gsm8kTool` stands for yours.

    refrain train CONFIG environment.path=examples/verl_tool.py reward.type=environment

If yours derives from verl's `BaseTool`, set `environment.python` to an interpreter with verl.
"""

from types import SimpleNamespace
from uuid import uuid4


class Gsm8kTool:
    """Checks an answer. Each wrong one costs a little."""

    def __init__(self):
        self.states = {}

    async def create(self, instance_id=None, ground_truth=None, **_):
        name = instance_id or str(uuid4())
        self.states[name] = {"truth": ground_truth, "answer": None, "cost": 0.0}
        return name, SimpleNamespace(text=None)

    async def execute(self, instance_id, parameters, **_):
        state = self.states[instance_id]
        state["answer"] = parameters["answer"]
        cost = 0.0 if await self.calc_reward(instance_id) == 1.0 else -0.05
        state["cost"] += cost
        return SimpleNamespace(text=f"Noted: {parameters['answer']}"), cost, {}

    async def calc_reward(self, instance_id, **_):
        state = self.states[instance_id]
        return float(state["answer"] == state["truth"])

    async def release(self, instance_id, **_):
        del self.states[instance_id]


TOOL = Gsm8kTool()


class Environment:
    """One conversation: an instance of the tool."""

    async def check_answer(self, answer: str):
        """Check an answer before you give it."""
        response, cost, _ = await TOOL.execute(self.id, {"answer": answer})
        self.cost += cost
        return response.text

    tools = [check_answer]  # from signatures and docstrings, in place of `tool_schema`

    async def reset(self, task):
        self.cost = 0.0
        self.id, _ = await TOOL.create(ground_truth=task.ground_truth)

    async def step(self, turn):
        """Execute calls. A turn without one ends the conversation."""
        if turn.calls or turn.problem:
            return await turn.run_async()
        return await TOOL.calc_reward(self.id) + self.cost

    async def close(self):
        await TOOL.release(self.id)
