"""The arguments of a job: read from its signature, checked as JSON, masked for display.

=====================  =======================================  ====================
annotation             JSON form                                value the job gets
=====================  =======================================  ====================
str, bool              the same                                 the same
int                    whole number (true is not one)           int
float                  number                                   float
Decimal                "12.50" or a number                      Decimal
date                   "2026-01-31"                             date
datetime               "2026-01-31T08:00:00+07:00"              aware datetime
Enum                   the member's value, or its name where    the member
                       the value is not a string or number
Literal                one of the values                        the value
list[X]                list of X                                list
dict                   object                                   dict
X | None               X or null                                X or None
anything else, none    any JSON                                 the JSON value
=====================  =======================================  ====================
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import inspect
import json
import math
import re
import reprlib
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

from django.utils.translation import gettext as _

from distcron_app.context import JobContext

__all__ = [
    "MASK",
    "Parameter",
    "Signature",
    "ValueType",
    "json_problem",
    "mask",
    "masked_arguments",
    "read_signature",
    "shown",
    "to_json",
    "unmasked",
]

SIZE_LIMIT_BYTES = 16_384
DEPTH_LIMIT = 10
MASK = "••••"
# Shorter values are ordinary words: hiding each would make a text unreadable.
SHORTEST_MASKED_VALUE = 4

_SECRET_WORDS = re.compile(
    "^(password|passwd|passphrase|secret|token|key|auth|authorization|credential)s?$"
)
_WORD_PARTS = re.compile("[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_UNSTORABLE = re.compile("[\x00\ud800-\udfff]")
_ARGS_HEADING = re.compile("^(?:Args|Arguments|Parameters):$")
_ARGS_ENTRY = re.compile(r"^\*{0,2}(\w+)(?:\s*\([^)]*\))?:\s*(.*)$")

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 60


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueType:
    """What one value may be. ``choices`` pairs each JSON form with the job's value."""

    kind: str = "json"
    is_nullable: bool = False
    choices: tuple[tuple[object, object], ...] = ()
    item: ValueType | None = None

    def convert(self, value: object) -> Any:
        """Return the job's value of JSON ``value``; raise ValueError saying what is allowed."""
        if value is None and self.is_nullable:
            return None
        return _CONVERTERS[self.kind](value, self)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One argument of a job. ``default`` means nothing where ``is_required``."""

    name: str
    type: ValueType
    is_required: bool
    default: object = None
    help: str = ""

    @property
    def is_secret(self) -> bool:
        """Tell whether the name says that values must not be shown."""
        return _is_secret(self.name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Signature:
    """What a callable accepts."""

    parameters: tuple[Parameter, ...]
    context_parameter: str | None
    accepts_extra: bool


def read_signature(function: Callable[..., object], label: str) -> Signature:
    """Read what ``function`` accepts. Raise TypeError for what keywords cannot fill."""
    parameters: list[Parameter] = []
    context_parameter = None
    accepts_extra = False
    hints, helps = _hints(function), _parameter_help(function)
    for position, raw in enumerate(inspect.signature(function).parameters.values()):
        hint = hints.get(raw.name, inspect.Parameter.empty)
        if raw.kind is raw.POSITIONAL_ONLY:
            raise TypeError(
                f"Job {label!r}: parameter {raw.name!r} is positional-only, but arguments are "
                "passed by name. Remove the '/' from the signature."
            )
        if raw.kind is raw.VAR_KEYWORD:
            accepts_extra = True
        elif raw.kind is raw.VAR_POSITIONAL:
            continue  # nothing can fill it, and being empty does no harm
        elif _is_context(raw, hint, position):
            if context_parameter is not None:
                raise TypeError(
                    f"Job {label!r}: {context_parameter!r} and {raw.name!r} both ask for the "
                    "context. Keep one."
                )
            context_parameter = raw.name
        else:
            parameters.append(_parameter(raw, hint, helps.get(raw.name, "")))
    return Signature(
        parameters=tuple(parameters),
        context_parameter=context_parameter,
        accepts_extra=accepts_extra,
    )


def json_problem(arguments: object) -> str:
    """Say why ``arguments`` is not an acceptable JSON object; empty when it is.

    At most 16 KB as compact UTF-8 and 10 levels; no NaN, Infinity, NUL or lone
    surrogate; keys are strings.
    """
    if not isinstance(arguments, dict):
        return _('must be a JSON object such as {"size": 5}, got %s.') % shown(arguments)
    for visited, (value, depth) in enumerate(_walk(arguments)):
        if depth > DEPTH_LIMIT:
            return _("must be nested at most %s levels deep.") % DEPTH_LIMIT
        # Each value takes a byte at least; stopping here bounds shared references.
        if visited > SIZE_LIMIT_BYTES:
            return _too_large()
        if problem := _scalar_problem(value):
            return problem
    return "" if _json_size(arguments) <= SIZE_LIMIT_BYTES else _too_large()


def to_json(value: object) -> Any:
    """Return the JSON form of a Python value that ``ValueType.convert`` could have made."""
    if isinstance(value, enum.Enum):
        return _enum_form(value)
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, decimal.Decimal):
        return str(value)
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    if isinstance(value, Mapping):
        return {key: to_json(item) for key, item in value.items()}
    return value


def shown(value: object) -> str:
    """Return a short form of ``value`` for a message."""
    return _SHORT.repr(value)


def masked_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy for display, where values under secret names read ``••••``.

    A name is secret when one of its words is password, secret, token, key, auth,
    credential or a near form: ``api_key`` and ``authToken`` are, ``monkey`` is not.
    """
    return {name: _masked(name, value) for name, value in arguments.items()}


def unmasked(typed: Any, stored: Any) -> Any:
    """Return ``typed`` with each value that was left masked replaced by the stored one."""
    if isinstance(typed, dict) and isinstance(stored, Mapping):
        return {
            name: stored[name]
            if value == MASK and name in stored
            else unmasked(value, stored.get(name))
            for name, value in typed.items()
        }
    if isinstance(typed, list) and isinstance(stored, list) and len(typed) == len(stored):
        return [unmasked(*pair) for pair in zip(typed, stored, strict=True)]
    return typed


def mask(text: str, arguments: Mapping[str, Any]) -> str:
    """Replace every value that ``arguments`` holds under a secret name by ``••••``.

    Also found: its repr, JSON and URL forms. Values shorter than 4 characters are not
    looked for, and a value that the job changed (encoded, split) cannot be found.
    """
    forms = {form for value in _secret_values(arguments) for form in _written_forms(value)}
    if not forms:
        return text
    pattern = "|".join(re.escape(form) for form in sorted(forms, key=len, reverse=True))
    return re.sub(pattern, MASK, text)


def _hints(function: Callable[..., object]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(function)
    except Exception:  # noqa: BLE001 - an annotation is any expression
        return _hints_one_by_one(function)


def _hints_one_by_one(function: Callable[..., object]) -> dict[str, Any]:
    # A name imported under TYPE_CHECKING spoils its own annotation alone.
    names = getattr(inspect.unwrap(function), "__globals__", {})
    hints: dict[str, Any] = {}
    for name, annotation in getattr(function, "__annotations__", {}).items():
        holder = types.SimpleNamespace(__annotations__={name: annotation})
        try:
            hints.update(typing.get_type_hints(holder, globalns=names))
        except Exception:  # noqa: BLE001
            hints[name] = annotation
    return hints


def _is_context(raw: inspect.Parameter, hint: object, position: int) -> bool:
    if isinstance(hint, str):
        return hint.split("|")[0].strip().rpartition(".")[2] == JobContext.__name__
    if hint is JobContext or JobContext in typing.get_args(hint):
        return True
    return position == 0 and raw.name == "ctx" and hint is raw.empty


def _parameter(raw: inspect.Parameter, hint: object, help_text: str) -> Parameter:
    is_required = raw.default is raw.empty
    value_type = _value_type(hint)
    if not is_required and raw.default is None:
        value_type = dataclasses.replace(value_type, is_nullable=True)
    return Parameter(
        name=raw.name,
        type=value_type,
        is_required=is_required,
        default=None if is_required else raw.default,
        help=help_text,
    )


def _value_type(hint: Any) -> ValueType:
    if isinstance(hint, type) and hint in _PLAIN_KINDS:
        return ValueType(kind=_PLAIN_KINDS[hint])
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return ValueType(kind="choice", choices=tuple((_enum_form(each), each) for each in hint))
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _value_type(inner[0])
    if origin is typing.Literal:
        return _literal(inner)
    if origin is list:
        return ValueType(kind="list", item=_value_type(inner[0]))
    if origin is dict:
        return ValueType(kind="object")
    if origin in (typing.Union, types.UnionType) and type(None) in inner and len(inner) == 2:
        other = inner[0] if inner[1] is type(None) else inner[1]
        return dataclasses.replace(_value_type(other), is_nullable=True)
    return ValueType()


def _literal(values: tuple[object, ...]) -> ValueType:
    choices = tuple((to_json(value), value) for value in values if value is not None)
    return ValueType(kind="choice", choices=choices, is_nullable=None in values)


def _enum_form(member: enum.Enum) -> object:
    value = member.value
    return value if isinstance(value, str | int | float) else member.name


def _parameter_help(function: Callable[..., object]) -> dict[str, str]:
    """Return the texts of the docstring's ``Args:`` section."""
    lines = iter((inspect.getdoc(function) or "").splitlines())
    if not any(_ARGS_HEADING.match(line) for line in lines):
        return {}
    helps: dict[str, str] = {}
    name, entry_indent = "", 0
    for line in lines:
        indent, text = len(line) - len(line.lstrip()), line.strip()
        if not text:
            continue
        if indent == 0:
            break
        entry = _ARGS_ENTRY.match(text)
        if entry and (not name or indent <= entry_indent):
            name, entry_indent = entry[1], indent
            helps[name] = entry[2]
        elif name:
            helps[name] = f"{helps[name]} {text}".strip()
    return helps


def _walk(root: object) -> Iterator[tuple[object, int]]:
    """Yield every value with the depth of the container it is or is in; keys included."""
    pending: list[tuple[object, int]] = [(root, 0)]
    while pending:
        value, depth = pending.pop()
        inner_depth = depth + isinstance(value, dict | list)
        yield value, inner_depth
        if inner_depth > DEPTH_LIMIT:
            continue
        if isinstance(value, dict):
            pending.extend((_Key(key), inner_depth) for key in value)
            pending.extend((item, inner_depth) for item in value.values())
        elif isinstance(value, list):
            pending.extend((item, inner_depth) for item in value)


@dataclasses.dataclass(frozen=True, slots=True)
class _Key:
    name: object


def _scalar_problem(value: object) -> str:
    if isinstance(value, _Key):
        if not isinstance(value.name, str):
            return _("must have text as keys, got %s.") % shown(value.name)
        value = value.name
    if isinstance(value, str) and _UNSTORABLE.search(value):
        return _("must not contain NUL or half of a surrogate pair, got %s.") % shown(value)
    if isinstance(value, float) and not math.isfinite(value):
        return _("must not contain NaN or Infinity; JSON has neither.")
    if value is None or isinstance(value, str | int | float | dict | list):
        return ""
    return _("must be JSON, got %(value)s (%(type)s).") % {
        "value": shown(value),
        "type": type(value).__name__,
    }


def _json_size(arguments: object) -> float:
    try:
        text = json.dumps(arguments, ensure_ascii=False, separators=(",", ":"))
    except ValueError:  # an integer of more than 4,300 digits
        return math.inf
    return len(text.encode())


def _too_large() -> str:
    return _("must be at most %s bytes of JSON.") % SIZE_LIMIT_BYTES


def _to_str(value: object, _type: ValueType) -> str:
    if isinstance(value, str):
        return value
    raise ValueError(_("must be text, got %s.") % shown(value))


def _to_bool(value: object, _type: ValueType) -> bool:
    if isinstance(value, bool):
        return value
    raise ValueError(_("must be true or false, got %s.") % shown(value))


def _to_int(value: object, _type: ValueType) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    raise ValueError(_("must be a whole number such as 5, got %s.") % shown(value))


def _to_float(value: object, _type: ValueType) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise ValueError(_("must be a number such as 2.5, got %s.") % shown(value))


def _to_decimal(value: object, _type: ValueType) -> decimal.Decimal:
    if isinstance(value, int | float | str) and not isinstance(value, bool):
        try:
            number = decimal.Decimal(str(value))
        except decimal.InvalidOperation:
            number = decimal.Decimal("NaN")
        if number.is_finite():
            return number
    raise ValueError(_('must be a decimal number such as "12.50", got %s.') % shown(value))


def _to_date(value: object, _type: ValueType) -> datetime.date:
    try:
        return datetime.date.fromisoformat(_to_str(value, _type))
    except ValueError:
        pass
    raise ValueError(_('must be a date such as "2026-01-31", got %s.') % shown(value))


def _to_datetime(value: object, _type: ValueType) -> datetime.datetime:
    try:
        instant = datetime.datetime.fromisoformat(_to_str(value, _type))
    except ValueError:
        instant = datetime.datetime.min  # noqa: DTZ901 - naive, so refused below
    if instant.utcoffset() is not None:
        return instant
    raise ValueError(
        _('must be a date and time with an offset such as "2026-01-31T08:00:00+07:00", got %s.')
        % shown(value)
    )


def _to_choice(value: object, type_: ValueType) -> object:
    for form, member in type_.choices:
        # True == 1 in Python, but not for a reader of JSON.
        if type(form) is type(value) and form == value:
            return member
    allowed = ", ".join(json.dumps(form, ensure_ascii=False) for form, _member in type_.choices)
    raise ValueError(
        _("must be one of %(allowed)s, got %(value)s.")
        % {"allowed": allowed, "value": shown(value)}
    )


def _to_list(value: object, type_: ValueType) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(_("must be a list such as [1, 2], got %s.") % shown(value))
    item = type_.item or ValueType()
    converted = []
    for position, each in enumerate(value, start=1):
        try:
            converted.append(item.convert(each))
        except ValueError as error:
            message = _("item %(position)s: %(problem)s")
            raise ValueError(message % {"position": position, "problem": error}) from error
    return converted


def _to_object(value: object, _type: ValueType) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    raise ValueError(_('must be an object such as {"size": 5}, got %s.') % shown(value))


_PLAIN_KINDS: dict[Any, str] = {
    str: "str",
    int: "int",
    float: "float",
    bool: "bool",
    decimal.Decimal: "Decimal",
    datetime.date: "date",
    datetime.datetime: "datetime",
    list: "list",
    dict: "object",
}
_CONVERTERS: dict[str, Callable[[Any, ValueType], Any]] = {
    "str": _to_str,
    "int": _to_int,
    "float": _to_float,
    "bool": _to_bool,
    "Decimal": _to_decimal,
    "date": _to_date,
    "datetime": _to_datetime,
    "choice": _to_choice,
    "list": _to_list,
    "object": _to_object,
    "json": lambda value, _type: value,
}


def _is_secret(name: str) -> bool:
    return any(_SECRET_WORDS.match(part.lower()) for part in _WORD_PARTS.findall(name))


def _masked(name: str, value: Any) -> Any:
    if _is_secret(name):
        return MASK
    if isinstance(value, dict):
        return masked_arguments(value)
    if isinstance(value, list):
        return [_masked("", item) for item in value]
    return value


def _secret_values(value: Any, *, is_secret: bool = False) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _secret_values(item, is_secret=is_secret or _is_secret(str(name)))
    elif isinstance(value, list):
        for item in value:
            yield from _secret_values(item, is_secret=is_secret)
    elif is_secret and value is not None and not isinstance(value, bool):
        yield str(value)


def _written_forms(value: str) -> Iterator[str]:
    forms = (value, repr(value)[1:-1], json.dumps(value)[1:-1], quote(value, safe=""))
    yield from (form for form in forms if len(form) >= SHORTEST_MASKED_VALUE)
