"""Conditions as people write them: `rain > 0.5 and month in (6, 7, 8)`. A small part of Python, no more."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np

from ..errors import Refused

_QUOTED = re.compile(r"`([^`]+)`")
_PLACED = r"_quoted_(\d+)_"
_COMPARISONS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.In: lambda left, right: reduce(np.logical_or, [_compared(ast.Eq, left, one) for one in right]),
    ast.NotIn: lambda left, right: ~reduce(np.logical_or, [_compared(ast.Eq, left, one) for one in right]),
}
_ARITHMETIC: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
_LOGIC = {ast.And: np.logical_and, ast.Or: np.logical_or}
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {"abs": np.abs, "isnan": np.isnan}


class Expression:
    """A condition on windows, understood but not yet asked: `names` are what it is about, in order of appearance.

    Names, numbers, 'texts', comparisons, `and`, `or`, `not`, `in`, + - * / %, abs(), isnan(); a name that Python would
    not take stands in `backticks`. Raises `Refused` for anything else.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        quoted: list[str] = []

        def placed(match: re.Match[str]) -> str:
            quoted.append(match[1])
            return f"_quoted_{len(quoted) - 1}_"

        def restored(name: str) -> str:
            match = re.fullmatch(_PLACED, name)
            return quoted[int(match[1])] if match and int(match[1]) < len(quoted) else name

        try:
            self._tree = ast.parse(_QUOTED.sub(placed, text).strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError) as error:
            raise self._refused(getattr(error, "msg", None) or str(error)) from error
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Name):
                node.id = restored(node.id)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                node.value = re.sub(_PLACED, lambda match: f"`{restored(match[0])}`", node.value)
        functions = {id(node.func) for node in ast.walk(self._tree) if isinstance(node, ast.Call)}
        found = [node for node in ast.walk(self._tree) if isinstance(node, ast.Name) and id(node) not in functions]
        self.names = tuple(dict.fromkeys(node.id for node in sorted(found, key=lambda node: node.col_offset)))
        self._require(self._tree)

    def __call__(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """Where it holds: bool, of the shape of the values."""
        found = np.asarray(self._of(self._tree, values))
        if found.dtype != bool:
            raise self._refused("it is a value, and not true or false")
        return found

    def _require(self, node: ast.AST) -> None:
        allowed = (
            ast.Name,
            ast.Constant,
            ast.Compare,
            ast.BoolOp,
            ast.UnaryOp,
            ast.BinOp,
            ast.Tuple,
            ast.List,
            ast.Call,
        )
        if not isinstance(node, allowed):
            raise self._refused(f"{ast.unparse(node)!r} is none of what is allowed")
        match node:
            case ast.Constant(value=value) if not isinstance(value, (int, float, str)):
                raise self._refused(f"{value!r} is neither a number nor a text")
            case ast.Compare(ops=operators) if not all(type(one) in _COMPARISONS for one in operators):
                raise self._refused("a comparison that is not allowed")
            case ast.BinOp(op=one) if type(one) not in _ARITHMETIC:
                raise self._refused(f"{ast.unparse(node)!r} is none of + - * / %")
            case ast.UnaryOp(op=one) if not isinstance(one, (ast.Not, ast.USub, ast.UAdd)):
                raise self._refused(f"{ast.unparse(node)!r} is not allowed")
            case ast.Call() if not self._is_call(node):
                raise self._refused(f"{ast.unparse(node)!r} is none of abs(…) and isnan(…)")
        for child in self._children(node):
            self._require(child)

    @staticmethod
    def _is_call(node: ast.Call) -> bool:
        return (
            isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS and len(node.args) == 1 and not node.keywords
        )

    @staticmethod
    def _children(node: ast.AST) -> list[ast.AST]:
        if isinstance(node, ast.Call):
            return list(node.args)
        return [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]

    def _of(self, node: ast.AST, values: Mapping[str, np.ndarray]) -> Any:
        match node:
            case ast.Name(id=name):
                return values[name]
            case ast.Constant(value=value):
                return value
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                return [self._of(part, values) for part in parts]
            case ast.Call(func=ast.Name(id=name), args=[argument]):
                return _FUNCTIONS[name](self._of(argument, values))
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return np.logical_not(self._of(operand, values))
            case ast.UnaryOp(op=one, operand=operand):
                return -self._of(operand, values) if isinstance(one, ast.USub) else self._of(operand, values)
            case ast.BinOp(left=left, op=one, right=right):
                return _ARITHMETIC[type(one)](self._of(left, values), self._of(right, values))
            case ast.BoolOp(op=one, values=parts):
                return reduce(_LOGIC[type(one)], [self._of(part, values) for part in parts])
            case ast.Compare(left=left, ops=operators, comparators=others):
                sides = [self._of(side, values) for side in (left, *others)]
                pairs = zip(operators, sides, sides[1:], strict=False)
                return reduce(np.logical_and, [_compared(type(one), a, b) for one, a, b in pairs])
        raise self._refused(f"{ast.unparse(node)!r} is none of what is allowed")

    def _refused(self, why: str) -> Refused:
        return Refused(
            "where",
            given=f"{self.text} ({why})",
            allowed="comparisons of names, numbers, 'texts' joined by and, or, not, in; + - * / %, abs(), isnan()",
            remedy='write it like "rain > 0.5 and month in (6, 7, 8)"; odd names in `backticks`',
        )


def _compared(how: type, left: Any, right: Any) -> Any:
    """Times are compared with dates written as text."""
    if how in (ast.In, ast.NotIn):
        return _COMPARISONS[how](left, right)
    return _COMPARISONS[how](_like(left, right), _like(right, left))


def _like(side: Any, other: Any) -> Any:
    if isinstance(side, str) and isinstance(other, np.ndarray) and other.dtype.kind == "M":
        return np.datetime64(side)
    return side
