"""A calculator as a tool. The run's reward scores the answer, for example reasoning-gym's own.

    refrain data reasoning-gym basic_arithmetic --size 1000 --held-out 100
    refrain train CONFIG environment.path=examples/calculator.py

docs/adapters.md has more.
"""

import ast
import operator

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> float:
    """Value of an expression of numbers, + - * / and parentheses, for example (2 + 3) * 4."""
    return value(ast.parse(expression.strip(), mode="eval").body)


def value(node):
    """Return the value of a part of an expression. Raise ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.left), value(node.right))
    if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value(node.operand))
    raise ValueError(f"{ast.unparse(node)} is not a number, + - * / or parentheses")


tools = [calculate]
