"""Jinja2 for templates that strangers wrote: no way to Python's internals, and a bound on time and memory.

Chat templates come with model files. jinja2's sandbox closes the way out; what it leaves open, templates that never
finish or build gigabytes, is metered here: every step that can repeat or grow pays for it first.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import datetime
from functools import wraps
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_WORK = 2**26  # characters and list items a rendering may build, counting each step as _STEP of them
MAX_SECONDS = 2.0
MAX_NUMBER = 1_000_000  # as an argument: of ljust it is already a megabyte
_STEP = 64

# Filters and string methods whose result is no larger than what goes in, or whose growth is metered below.
_FILTERS = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float"),
    *("forceescape", "groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map"),
    *("max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr"),
    *("sort", "string", "title", "trim", "unique", "upper", "wordcount"),
)
_STR_METHODS = frozenset(
    (
        *("capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha"),
        *("isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace"),
        *("istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace"),
        *("rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip"),
        *("swapcase", "title", "upper"),
    )
)
_WIDE_FORMAT = re.compile(r"\d{6}|\*")


class Meter:
    """What one rendering may still spend; raises SecurityError when it is used up."""

    def __init__(self) -> None:
        self.left = MAX_WORK
        self.deadline = time.monotonic() + MAX_SECONDS

    def spend(self, amount: int) -> None:
        """Pays for one step that builds `amount` characters or items."""
        self.left -= amount + _STEP
        if self.left < 0 or time.monotonic() > self.deadline:
            raise SecurityError("it does not come to an end, or builds far more text than a prompt can hold")

    def built(self, value: Any) -> Any:
        """Pays for a value that was just built and returns it."""
        self.spend(len(value) if isinstance(value, (str, list, tuple, dict)) else 0)
        return value

    def nested(self, value: Any) -> Any:
        """Pays for a new container with all that it holds, written out: shared parts count each time."""
        self.spend(1)
        if isinstance(value, dict):
            value = value.values()
        elif not isinstance(value, (list, tuple)):
            return value
        for item in value:
            if isinstance(item, (dict, list, tuple)):
                self.nested(item)
            elif isinstance(item, str):
                self.spend(len(item))
        return value


class _MeteredCode(CodeGenerator):
    """Compiles loops, `~` and literals so that they pay."""

    environment: "Sandbox"

    def visit_Template(self, node: nodes.Template, frame: Frame | None = None) -> None:  # noqa: N802 (jinja2's name)
        for loop in node.find_all(nodes.For):
            literal = sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
            loop.iter = nodes.Filter(loop.iter, "_metered", [nodes.Const(literal)], [], None, None)
            loop.iter.set_lineno(loop.lineno)
            loop.iter.set_environment(self.environment)
        super().visit_Template(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    def _literal(self, visit: Callable[[Any, Frame], None], node: nodes.Node, frame: Frame) -> None:
        self.write("environment.literal(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:  # noqa: N802
        self._literal(super().visit_List, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:  # noqa: N802
        if node.ctx == "load":
            self._literal(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:  # noqa: N802
        self._literal(super().visit_Dict, node, frame)


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it only prints it."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates of transformers expect, metered. Serves one rendering at a time."""

    code_generator_class = _MeteredCode
    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=self._printed
        )
        self.meter = Meter()
        self.filters = {name: self._metered_filter(FILTERS[name]) for name in _FILTERS}
        self.filters |= {"tojson": self._metered_filter(_to_json), "_metered": self._metered_loop()}
        self.globals = {"range": self.globals["range"]}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
        self.globals |= {"namespace": _Namespace, "dict": _dict}

    def concatenate(self, parts: tuple[Any, ...]) -> str:
        """`a ~ b`."""
        return str(self.meter.built("".join(map(str, self._joinable(parts)))))

    def literal(self, value: Any) -> Any:
        """`[…]`, `(…)` and `{…}`."""
        self.meter.nested(value)
        return value

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Numbers have no attributes here, and strings only methods that are known to be harmless."""
        if isinstance(obj, (int, float, bytes)) or (isinstance(obj, str) and attr not in _STR_METHODS):
            return False
        if isinstance(obj, str) and attr == "format" and _WIDE_FORMAT.search(obj):
            return False
        return super().is_safe_attribute(obj, attr, value)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as in jinja2)
        """Calls that pay for what they return, and beforehand for what `replace` and `join` will build."""
        __self._check_numbers(args, kwargs)
        if isinstance(__obj, Macro) and (__obj.catch_varargs or __obj.catch_kwargs):
            __self.literal([args, kwargs])  # they become containers inside
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            args = __self._pay_for_text(owner, getattr(__obj, "__name__", ""), args)
        result = super().call(__context, __obj, *args, **kwargs)
        return __self.literal(result) if __obj is _dict else __self.meter.built(result)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """`+ * ** %`, refused before they build something huge."""
        if operator == "*":
            for one, times in ((left, right), (right, left)):
                if isinstance(one, Sized) and isinstance(times, int):
                    self.meter.spend(len(one) * max(times, 0))
        if operator in ("*", "**") and not self._small(left, right, power=operator == "**"):
            raise SecurityError("it computes with numbers of thousands of digits")
        if operator == "%" and isinstance(left, str):
            if _WIDE_FORMAT.search(left):
                raise SecurityError("it formats text to an enormous width")
            self._joinable([right])
        result = super().call_binop(context, operator, left, right)
        return self.literal(result) if operator == "*" else self.meter.built(result)

    @staticmethod
    def _small(left: Any, right: Any, *, power: bool) -> bool:
        if not (isinstance(left, int) and isinstance(right, int)):
            return True
        bits = left.bit_length() * max(right, 1) if power else left.bit_length() + right.bit_length()
        return bits <= 4096

    def _pay_for_text(self, owner: str, method: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if method == "replace" and len(args) >= 2:
            self.meter.spend(len(owner) + (owner.count(args[0]) * len(args[1]) if isinstance(args[0], str) else 0))
        elif method == "join" and args:
            items = list(args[0])
            self.meter.spend(len(owner) * len(items))
            return (self._joinable(items), *args[1:])
        elif method == "format":
            self._joinable(args)
        return args

    def _joinable(self, items: Iterable[Any]) -> list[Any]:
        """Pays for items that are about to be written one after another."""
        items = list(items)
        self.meter.nested(items)
        return items

    def _check_numbers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, (int, float)) and abs(value) > MAX_NUMBER:
                raise SecurityError(f"it passes {value:.0e} where a count is expected" if value < 1e300 else "endless")

    def _printed(self, value: Any) -> Any:
        if isinstance(value, (dict, list, tuple)):
            self.meter.nested(value)
        return self.meter.built(value)

    def _metered_filter(self, function: Callable[..., Any]) -> Callable[..., Any]:
        text = {"do_join": "join", "do_replace": "replace"}.get(function.__name__)

        @wraps(function)  # keeps jinja2's marks for filters that want the context
        def metered(*args: Any, **kwargs: Any) -> Any:
            self._check_numbers(args, kwargs)
            if text == "join":
                context, items, *rest = args
                separator = rest[0] if rest else kwargs.get("d", "")
                items = self._joinable(items)
                self.meter.spend(len(str(separator)) * len(items))
                args = (context, items, *rest)
            elif text == "replace":
                self._pay_for_text(str(args[1]), "replace", args[2:])
            elif function is _to_json or function.__name__ in ("do_string", "soft_str"):
                self._joinable(args[:1])
            return self.meter.built(function(*args, **kwargs))

        return metered

    def _metered_loop(self) -> Callable[..., Any]:
        @pass_context
        def metered(_context: Context, items: Iterable[Any], literal: int) -> Iterator[Any]:
            for item in items:
                self.meter.spend(literal)
                yield item

        return metered


class _Namespace(Namespace):
    """jinja2's, without attributes that Python itself would look for."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as in jinja2, so that `self` is free as a name
        for name in dict(*args[1:], **kwargs):
            _check_name(name)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"it stores {name!r} on a namespace, where names begin with a letter")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Plain JSON: jinja2's own escapes `<` and `>` for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
