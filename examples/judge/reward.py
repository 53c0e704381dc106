"""A reward by a judge behind an OpenAI-compatible URL: `JUDGE_URL`, `JUDGE_MODEL`, `JUDGE_API_KEY`.

Async, so that 32 responses are judged at once. It raises when the judge cannot be asked:
`reward.on_error` says what that means for a run.
"""

import os
import re

import httpx

PROMPT = """Question: {question}
Right answer: {truth}
Response: {response}

Is the response right, and is it clear? Reply with two numbers from 0 to 10, as in
CORRECT=7 CLEAR=9"""
GRADE = re.compile(r"CORRECT\s*=\s*(10|\d)\s+CLEAR\s*=\s*(10|\d)\b")


async def compute_score(data_source, solution_str, ground_truth, extra_info=None, weight=0.1):
    """Score from 0 to 1, and both parts of it, which the record has by their names."""
    question = (extra_info or {}).get("question", data_source)
    text = PROMPT.format(question=question, truth=ground_truth, response=solution_str[-8000:])
    body = {
        "model": os.environ["JUDGE_MODEL"],
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
    }
    key = {"Authorization": f"Bearer {os.environ['JUDGE_API_KEY']}"}
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as client:
        reply = await client.post(
            f"{os.environ['JUDGE_URL']}/chat/completions", json=body, headers=key
        )
        reply.raise_for_status()
    content = reply.json()["choices"][0]["message"]["content"]
    grade = GRADE.search(content)
    if grade is None:
        raise ValueError(f"the judge gave no grade: {content[:100]!r}")
    correct, clear = (int(number) / 10 for number in grade.groups())
    return {"score": (1 - weight) * correct + weight * clear, "correct": correct, "clear": clear}
