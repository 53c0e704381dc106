"""Convert public sets of questions to veRL's rows, which `dataset` reads. Pure.

{"question": .., "answer": ".. #### 72"}  ─►  {"data_source", "prompt", "ability",
                                               "reward_model", "extra_info"}
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from refrain.engines.answers.extraction import boxed_answer, number_after_mark
from refrain.engines.data.dataset import COLUMNS
from refrain.engines.data.messages import AS_THEY_ARE, BadRowError, messages_of
from refrain.engines.data.repeats import content_hash

Row = dict[str, Any]

GSM8K_INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
MATH_INSTRUCTION = "Let's think step by step and output the final answer within \\boxed{}."
"""Instructions that veRL's scripts append to a question."""


@dataclass(frozen=True, slots=True)
class Columns:
    """Columns of a set of questions, with the texts of its prompts."""

    question: str
    answer: str
    data_source: str
    """Name that selects the scorer."""
    instruction: str
    """Text after each question, or empty."""
    extract: Callable[[str], str | None] = str
    """Function that finds the right answer in the answer column's text, or returns None."""

    def convert(self, row: Mapping[str, Any], split: str, index: int) -> Row:
        """Return the row in veRL's form. Raises BadRowError."""
        messages, solution = self._messages(row), self._text(row, self.answer)
        answer = self.extract(solution)
        if answer is None:
            raise BadRowError(f"`{self.answer}` holds no answer: {solution[-60:]!r}")
        return {
            "data_source": self.data_source,
            "prompt": messages,
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": answer.strip()},
            "extra_info": {"split": split, "index": index},
        }

    def _messages(self, row: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the prompt with the instruction after its last message. Raises BadRowError."""
        if isinstance(row.get(self.question), list):
            messages = messages_of({"prompt": row[self.question]}, AS_THEY_ARE)
        else:
            messages = [{"role": "user", "content": self._text(row, self.question)}]
        *earlier, last = messages
        if last["role"] == "assistant":
            raise BadRowError(
                f"`{self.question}` ends with a message of the assistant: name a column with the "
                "messages before it"
            )
        return [*earlier, last | {"content": f"{last['content']} {self.instruction}".strip()}]

    def _text(self, row: Mapping[str, Any], name: str) -> str:
        if name not in row:
            raise BadRowError(f"no column `{name}`: the row has {', '.join(row) or 'no columns'}")
        value = row[name]
        if not isinstance(value, str | int | float) or value == "":
            raise BadRowError(f"`{name}` is {value!r}: make it a text or a number")
        return str(value)


def _gsm8k_answer(solution: str) -> str | None:
    answer = number_after_mark(solution)
    return answer and answer.replace(",", "")


def stated_answer(text: str) -> str:
    """Return the answer after `####` or in a box, or else the whole text."""
    return _gsm8k_answer(text) or text


def take_over(row: Mapping[str, Any], split: str, index: int) -> Row:
    """Return a row that is in veRL's form already. Raises BadRowError if it is not."""
    del split, index
    missing = [name for name in COLUMNS[:-1] if row.get(name) is None]
    if missing:
        raise BadRowError(
            f"no `{'`, no `'.join(missing)}`: name the columns to convert with --prompt and "
            f"--answer; the row has {', '.join(row) or 'no columns'}"
        )
    messages_of(row, AS_THEY_ARE)
    if not isinstance(row["data_source"], str):
        raise BadRowError("`data_source` is not a text: set it to the name that selects the scorer")
    rewarded = row["reward_model"]
    if not isinstance(rewarded, dict) or "ground_truth" not in rewarded:
        raise BadRowError("no `reward_model.ground_truth`: add what the scorer compares with")
    return {name: row[name] for name in (*COLUMNS, "ability") if row.get(name) is not None}


@dataclass(frozen=True, slots=True)
class PublicSet:
    """Data set on the Hugging Face Hub."""

    repository: str
    splits: tuple[str, ...]
    convert: Callable[[Mapping[str, Any], str, int], Row]
    subset: str | None = None
    about: str = ""


PUBLIC: dict[str, PublicSet] = {
    "gsm8k": PublicSet(
        "openai/gsm8k",
        ("train", "test"),
        Columns("question", "answer", "openai/gsm8k", GSM8K_INSTRUCTION, _gsm8k_answer).convert,
        subset="main",
        about="grade-school word problems",
    ),
    "math": PublicSet(
        "DigitalLearningGmbH/MATH-lighteval",
        ("train", "test"),
        Columns(
            "problem",
            "solution",
            "DigitalLearningGmbH/MATH-lighteval",
            MATH_INSTRUCTION,
            boxed_answer,
        ).convert,
        about="competition problems",
    ),
    "dapo17k": PublicSet(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        ("train",),
        take_over,
        about="the training set of DAPO, each prompt once",
    ),
    "aime": PublicSet(
        "HuggingFaceH4/aime_2024",
        ("train",),
        Columns("problem", "answer", "aime_2024", MATH_INSTRUCTION).convert,
        about="the 30 problems of 2024",
    ),
}
"""Public sets by their short names."""


@dataclass(slots=True)
class Converted:
    """Distinct rows of one split."""

    rows: list[Row] = field(default_factory=list)
    num_repeated: int = 0
    """Number of rows left out because they repeat an earlier row's prompt and `extra_info`."""


def convert_rows(
    rows: Iterable[Mapping[str, Any]],
    convert: Callable[[Mapping[str, Any], str, int], Row],
    split: str,
) -> Converted:
    """Convert all rows, and keep each prompt once for each `extra_info` (`engines.data.repeats`).
    Raises ValueError that names the first bad row, from 1."""
    converted, seen = Converted(), set()
    for index, given in enumerate(rows):
        try:
            row = convert(given, split, index)
        except BadRowError as error:
            raise ValueError(f"{split}, row {index + 1}: {error}") from error
        prompt = tuple((message["role"], message["content"]) for message in row["prompt"])
        extra_info = row.get("extra_info")
        sample = (prompt, content_hash(extra_info if isinstance(extra_info, dict) else {}))
        if sample in seen:
            converted.num_repeated += 1
        else:
            seen.add(sample)
            converted.rows.append(row)
    return converted
