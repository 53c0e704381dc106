"""Tool of the demo: a calculator for sums of products. See docs/environments.md."""

import math
import re


def calculate(expression: str) -> int:
    """Value of an expression such as 12*34+56*78."""
    if not re.fullmatch(r"[0-9]+([+*][0-9]+)*", expression):
        raise ValueError("write numbers with + or * between them")
    return sum(math.prod(map(int, product.split("*"))) for product in expression.split("+"))


tools = [calculate]
