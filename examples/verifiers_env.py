"""An environment of verifiers 0.1, as it is: refrain's policy takes the place of its model.

    venvs/verifiers/bin/python examples/verifiers_env.py MY_ENV 100 > data/mine.jsonl

writes its first 100 prompts. docs/adapters.md has all commands.
"""

import asyncio
import json
import sys
from functools import cache

import verifiers as vf
from verifiers.types import Response, ResponseMessage, ToolCall

load = cache(vf.load_environment)
TOOLS = """You may call these functions:
<tools>
{}
</tools>
For each call, write <tool_call>{{"name": "...", "arguments": {{...}}}}</tool_call>."""


class Policy(vf.OpenAIChatCompletionsClient):
    """Model of a rollout, whose answers are the turns of refrain's policy."""

    def __init__(self):
        super().__init__(None)
        self.asked, self.turns = asyncio.Queue(), asyncio.Queue()

    async def get_response(self, prompt, *_, **__):
        self.asked.put_nowait(prompt)
        turn = await self.turns.get()
        calls = [
            ToolCall(id=str(number), name=one.name, arguments=json.dumps(one.arguments))
            for number, one in enumerate(turn.calls)
        ]
        text = turn.text.partition("<tool_call>")[0] if calls else turn.text
        rest = {"finish_reason": "tool_calls" if calls else "stop", "is_truncated": False}
        message = ResponseMessage(content=text, tool_calls=calls or None, **rest)
        return Response(id="turn", created=0, model="policy", message=message)


class Verifiers:
    """One rollout. Its score is the reward of the environment's rubric."""

    def __init__(self, id, **arguments):
        """`id`, `arguments`: those of `vf.load_environment`."""
        self.id, self.arguments = id, arguments

    async def reset(self, task):
        self.policy, row = Policy(), json.loads(task.extra_info["row"])
        rollout = load(self.id, **self.arguments).run_rollout(row, self.policy, "policy", {})
        self.rollout = asyncio.ensure_future(rollout)
        self.rollout.add_done_callback(self.policy.asked.put_nowait)
        await self.next()

    async def step(self, turn):
        """Return the messages that the environment adds, or the reward."""
        if turn.problem:
            return turn.run()
        before = len(self.prompt)
        self.policy.turns.put_nowait(turn)
        ended = await self.next()
        if ended is not None:
            return ended
        return [{"role": one.role, "content": one.content} for one in self.prompt[before + 1 :]]

    async def next(self):
        """Wait for the next prompt, or return the reward."""
        found = await self.policy.asked.get()
        if found is not self.rollout:
            self.prompt = found
            return None
        output = found.result()
        if output["error"]:
            raise RuntimeError(output["error"])
        return output["reward"]

    def end(self, _reason):
        return 0.0

    async def close(self):
        self.rollout.cancel()


def row_of(env, name, row):
    """Return a row of a data set in veRL's format."""
    tools = "\n".join(tool.model_dump_json() for tool in env.tool_defs or [])
    system = [{"role": "system", "content": TOOLS.format(tools)}] if tools else []
    return {
        "data_source": f"verifiers/{name}",
        "prompt": [*system, *row["prompt"]],
        "reward_model": {"ground_truth": row.get("answer") or ""},
        "extra_info": {"row": json.dumps(row)},
    }


if __name__ == "__main__":
    name, size = sys.argv[1:]
    env = load(name)
    rows = env.get_dataset(int(size))
    print("\n".join(json.dumps(row_of(env, name, row)) for row in rows))
