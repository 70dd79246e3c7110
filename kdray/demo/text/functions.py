"""Short Python functions, and a checker that runs them."""

from __future__ import annotations

import ast
import random
from collections.abc import Callable, Mapping
from typing import Any

from kdray.demo.text.document import Exchange, Fact, Verdict
from kdray.demo.text.draw import Draw, is_held_out
from kdray.demo.text.operations import OPERATIONS, Operation

HELD_OUT_SHARE = 0.08
LISTS = ("numbers", "values", "items", "data", "scores", "prices", "ages", "points")
PROMPTS = (
    "Write a Python function {name} that {phrase}.",
    "Write a function called {name} in Python. It {phrase}.",
    "Please write {name}({x}), a Python function that {phrase}.",
    "I need a Python function {name} that {phrase}.",
)
DOCSTRINGS = ("This {phrase}.", "A function that {phrase}.", "It {phrase}.")
OPERATION_NAMES = tuple(OPERATIONS)
SAFE_BUILTINS: Mapping[str, Callable[..., Any]] = {
    function.__name__: function
    for function in (sum, max, min, len, range, sorted, reversed, abs, enumerate, zip, list, set)
}
_FORBIDDEN = (ast.Import, ast.ImportFrom, ast.While, ast.Global, ast.Nonlocal, ast.Try, ast.With)
_METHODS = {"append", "count"}


def make_function(draw: Draw, held_out: bool = False) -> Exchange:
    """A request for a function, and the function."""
    start = draw.nats
    while True:
        key, x, k = draw.fact(OPERATION_NAMES), draw.fact(LISTS), draw.number(2, 9)
        operation = OPERATIONS[key]
        number = k if operation.uses_constant else 0
        name = draw.fact(operation.names)
        if is_held_out(HELD_OUT_SHARE, key, name, x, number) == held_out:
            break
    phrase = operation.phrase.format(x=x, k=k)
    prompt = draw.fact(PROMPTS).format(name=name, phrase=phrase, x=x)
    docstring = draw.wording(DOCSTRINGS, "docstring", key, x)
    body = draw.wording(operation.bodies, "body", key, x)
    answer = _source(name, x, docstring.format(phrase=phrase), body.format(x=x, k=k))
    facts: dict[str, Fact] = {"operation": key, "name": name, "list": x, "k": k}
    return Exchange("function", prompt, answer, facts, draw.nats - start)


def _source(name: str, x: str, docstring: str, body: str) -> str:
    return f'def {name}({x}):\n    """{docstring}"""\n{body}'


def check_function(facts: Mapping[str, Fact], answer: str) -> Verdict:
    """Facts: the function runs and is right on random lists. Strict: in the grammar's words too."""
    operation = OPERATIONS[str(facts["operation"])]
    fault = _run_fault(operation, facts, answer)
    if fault:
        return Verdict(False, False, fault)
    if answer.strip() in _derivable(operation, facts):
        return Verdict(True, True)
    return Verdict(False, True, "right, but in other words than the grammar's")


def _derivable(operation: Operation, facts: Mapping[str, Fact]) -> set[str]:
    name, x, k = str(facts["name"]), str(facts["list"]), facts["k"]
    phrase = operation.phrase.format(x=x, k=k)
    return {
        _source(name, x, doc.format(phrase=phrase), body.format(x=x, k=k))
        for doc in DOCSTRINGS
        for body in operation.bodies
    }


def _run_fault(operation: Operation, facts: Mapping[str, Fact], answer: str) -> str | None:
    """Why the function is wrong, or None. Nothing but harmless syntax is ever executed."""
    try:
        tree = ast.parse(answer.strip())
    except (SyntaxError, ValueError) as error:
        return f"does not parse: {error}"
    unsafe = next((type(node).__name__ for node in ast.walk(tree) if _is_unsafe(node)), None)
    if unsafe or len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return f"not one plain function ({unsafe or 'other statements'})"
    if tree.body[0].name != facts["name"]:
        return f"called {tree.body[0].name}, not {facts['name']}"
    return _wrong_result(operation, tree, tree.body[0].name, int(facts["k"]))


def _is_unsafe(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return node.attr not in _METHODS
    if isinstance(node, ast.Name):
        return node.id.startswith("__")
    return isinstance(node, (*_FORBIDDEN, ast.Pow, ast.LShift))


def _wrong_result(operation: Operation, tree: ast.Module, name: str, k: int) -> str | None:
    namespace: dict[str, Any] = {"__builtins__": dict(SAFE_BUILTINS)}
    rng = random.Random(0)
    try:
        exec(compile(tree, "<answer>", "exec"), namespace)
        for _ in range(12):
            values = [rng.randint(-3, 12) for _ in range(rng.randint(1, 9))]
            got, expected = namespace[name](list(values)), operation.result(values, k)
            if got != expected:
                return f"{name}({values}) is {got!r}, not {expected!r}"
    except Exception as error:
        return f"raises {type(error).__name__}: {error}"
    return None
