"""Multi-turn questions of BFCL about files, with the tools of its file system.

    venvs/bfcl/bin/python examples/bfcl_env.py > data/bfcl.jsonl

writes those of `multi_turn_base`. docs/adapters.md has all commands.
"""

import ast
import json
from pathlib import Path

import bfcl_eval
from bfcl_eval.eval_checker.multi_turn_eval.func_source_code import gorilla_file_system

DATA = Path(bfcl_eval.__file__).parent / "data"
NAME = "BFCL_v4_multi_turn_base.json"
Files = gorilla_file_system.GorillaFileSystem


class FileSystem(Files):
    """Files of one conversation. The score is 1 if all results of BFCL's solution have been seen,
    and the files are as it leaves them."""

    tools = [tool for name, tool in vars(Files).items() if not name.startswith("_")]

    def reset(self, task):
        given = json.loads(task.ground_truth)
        self.questions, self.seen = given["questions"], set()
        self._load_scenario(given["files"])
        self.solution = Files()
        self.solution._load_scenario(given["files"])
        self.wanted = {result_of(self.solution, text) for text in given["calls"]}

    def step(self, turn):
        """Return results of tools, or else the next question. Score after the last one."""
        if turn.calls or turn.problem:
            results = turn.run()
            self.seen |= {one["content"] for one in results}
            return results
        if self.questions:
            return self.questions.pop(0)
        return float(self == self.solution and self.wanted <= self.seen)

    def end(self, _reason):
        return 0.0


def result_of(files, text):
    """Return the result of a call written as Python, such as `cd(folder='temp')`, as JSON."""
    node = ast.parse(text, mode="eval").body
    named = {one.arg: ast.literal_eval(one.value) for one in node.keywords}
    result = getattr(files, node.func.id)(*map(ast.literal_eval, node.args), **named)
    return json.dumps(result, ensure_ascii=False)


def rows():
    """Return rows of a data set in veRL's format."""
    questions, answers = ((DATA / part / NAME).open() for part in (".", "possible_answer"))
    for question, answer in zip(map(json.loads, questions), map(json.loads, answers), strict=True):
        if question["involved_classes"] == ["GorillaFileSystem"]:
            first, *later = [turn[0]["content"] for turn in question["question"]]
            truth = {
                "files": question["initial_config"]["GorillaFileSystem"],
                "questions": later,
                "calls": [one for turn in answer["ground_truth"] for one in turn],
            }
            yield {
                "data_source": "bfcl/files",
                "prompt": [{"role": "user", "content": first}],
                "reward_model": {"ground_truth": json.dumps(truth)},
                "extra_info": {"id": question["id"]},
            }


if __name__ == "__main__":
    print("\n".join(map(json.dumps, rows())))
