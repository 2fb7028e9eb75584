"""Where chat templates run: a template is a program from a stranger, so its work has an end.

Jinja's sandbox keeps a template from the machine; this one also keeps it from running on. A render
has a budget in characters, paid by every turn of a loop, every call, filter, product and text that
is put together, and a time. That ends loops, recursion and texts that double. It is no wall against
a template that is made to harm: one call into Python's own code (a comparison of lists that hold
each other over and over, a format string of many wide numbers) can still take all time or memory.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator
from jinja2.exceptions import TemplateRuntimeError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

BUDGET = 1 << 28  # characters, and a number of times those of the messages
TIMES = 64
STEP = 1024  # what a turn of a loop or a call costs beside the text it may print
SECONDS = 5.0
WIDEST = 1 << 20  # of a text padded to a width
LONGEST_NUMBER = 4096  # bits
# Filters and methods of texts whose numbers are widths, lengths or powers of ten.
_PADDING = (
    "batch", "center", "expandtabs", "indent", "ljust", "rjust", "round", "slice", "tojson",
    "wordwrap", "zfill",
)  # fmt: skip
# In a format string: %*d, {:{}} and numbers of seven digits.
_FREE_WIDTH = re.compile(r"%(\([^)]*\))?[^%a-zA-Z(]*(\*|\d{7})|\{[^{}]+\{|\{[^{}]*:[^{}]*\d{7}")
_SIZED = (str, list, tuple, dict, range)


class TooMuchWork(TemplateRuntimeError):
    """A template that goes on and on."""


class _Generation(Extension):
    """{% generation %} to {% endgeneration %}, what a model was trained on: text like any other."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Compiler(CodeGenerator):
    """Jinja's, with every loop over `counted` items and every `~` measured."""

    def visit_Template(self, node: nodes.Template, frame: Any = None) -> None:
        for loop in node.find_all(nodes.For):
            body = sum(len(text.data) for text in loop.find_all(nodes.TemplateData))
            loop.iter = nodes.Filter(loop.iter, "counted", [nodes.Const(body)], [], None, None)
            loop.iter.set_environment(self.environment)
        super().visit_Template(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Any) -> None:
        self.write("environment.paid(")
        super().visit_Concat(node, frame)
        self.write(")")


class Sandbox(ImmutableSandboxedEnvironment):
    """An environment for one rendering of one template."""

    code_generator_class = _Compiler
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, template: str, given: int) -> None:
        """given: characters of the messages, and a step for each."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[loopcontrols, _Generation],
            finalize=self.paid,
            optimized=False,  # else products of constants are computed before anything is counted
        )
        del self.globals["lipsum"]
        self.filters = {name: self._limited(name, f) for name, f in self.filters.items()}
        self.filters["counted"] = self.counted
        self._left = BUDGET + TIMES * given
        self._end = time.monotonic() + SECONDS
        self._template = template

    def add(self, filters: Mapping[str, Any], functions: Mapping[str, Any]) -> None:
        """More that the template may use."""
        self.filters |= {name: self._limited(name, f) for name, f in filters.items()}
        self.globals |= functions

    def text(self, **values: Any) -> str:
        """What the template makes of the values. Anything may be raised."""
        return self.from_string(self._template).render(**values)

    def spend(self, characters: int) -> None:
        self._left -= characters
        if self._left < 0 or time.monotonic() > self._end:
            raise TooMuchWork("it does not come to an end, or writes without end")

    def paid(self, value: Any) -> Any:
        """The value, its size paid."""
        self.spend(_size(value))
        return value

    def counted(self, items: Iterable[Any], text: int) -> Iterator[Any]:
        """The items of a loop, each paid as it comes. text: characters in the loop's body."""
        for item in items:
            self.spend(STEP + text)
            yield item

    def call(self, context: Context, function: Any, *args: Any, **named: Any) -> Any:  # pyright: ignore
        inside = isinstance(function, (Macro, LoopContext))  # what is called is of the template
        self.spend(STEP + (len(self._template) if inside else 0))
        if isinstance(function, LoopContext):  # a recursive loop, one level down
            args = (self.counted(args[0], len(self._template)), *args[1:])
        elif isinstance(owner := getattr(function, "__self__", None), str):
            self._prepay(function.__name__, owner, (*args, *named.values()))
        return self.paid(super().call(context, function, *args, **named))

    def getattr(self, obj: Any, attribute: str) -> Any:
        self._check_format(obj, attribute)
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self._check_format(obj, argument)
        return super().getitem(obj, argument)

    def _check_format(self, obj: Any, attribute: Any) -> None:
        """Here, and not where it is called, since Jinja hides what it calls."""
        if isinstance(obj, str) and attribute in ("format", "format_map"):
            self._prepay("format", obj, ())

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for many, few in ((left, right), (right, left)):
                self.spend(_size(many) * max(few, 0) if isinstance(few, int) else 0)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_number(left.bit_length() * right)
        elif operator == "%" and isinstance(left, str):
            self._prepay("format", left, ())
        value = super().call_binop(context, operator, left, right)
        if isinstance(value, int):
            _check_number(value.bit_length())
        return self.paid(value)

    def _limited(self, name: str, filter_: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that pays for what it reads and what it makes."""
        first = hasattr(filter_, "jinja_pass_arg")  # the value is then the second argument

        @wraps(filter_)
        def run(*args: Any, **named: Any) -> Any:
            given = args[1:] if first else args
            self.spend(STEP + (len(given[0]) if isinstance(given[0], _SIZED) else 0))
            self._prepay(name, given[0], (*given[1:], *named.values()))
            return self.paid(filter_(*args, **named))

        return run

    def _prepay(self, name: str, value: Any, rest: tuple[Any, ...]) -> None:
        """Pay for what a filter or a text's method would make of little, or refuse it."""
        if name in _PADDING:
            if any(isinstance(v, int) and v > WIDEST for v in rest):
                raise TooMuchWork(f"it calls {name} with a number above {WIDEST}")
        elif name == "format":
            if isinstance(value, str) and _FREE_WIDTH.search(value):
                raise TooMuchWork("it formats with a computed or a huge width")
        elif name == "join":  # a list's filter, or the method of what comes between
            parts = rest[0] if isinstance(value, str) and rest else value
            between = value if isinstance(value, str) and rest else rest[0] if rest else ""
            if isinstance(parts, (list, tuple, range)):
                self.spend(sum(_size(p) + _size(between) for p in parts))
        elif (
            name == "replace"
            and isinstance(value, str)
            and all(isinstance(v, str) for v in rest[:2])
        ):
            self.spend(value.count(rest[0]) * len(rest[1]) if len(rest) > 1 else 0)


def _check_number(bits: int) -> None:
    if bits > LONGEST_NUMBER:
        raise TooMuchWork(f"it computes a number of more than {LONGEST_NUMBER} bits")


def _size(value: Any) -> int:
    """Characters that a value stands for."""
    if isinstance(value, str):
        return len(value)
    return 8 * len(value) if isinstance(value, _SIZED) else 0  # a place of 8 bytes each
