"""The grammar of cron text: what is accepted, and why the rest is refused.

    rule    = minute hour day month weekday        five fields, blanks between
            | @hourly @daily @midnight @weekly @monthly @yearly @annually
    field   = term ("," term)*
    term    = "*" | "*/" step | number | number "-" number | number "-" number "/" step
    number  = one or two digits, or the first three letters of a month or weekday
    day     also "L" (last day); weekday also "L5" (last Friday) and "5#3" (third Friday)

Spellings that cron programs read differently (5/15, 22-2, 1-1, ?, W, H, R, a sixth
field) are refused with the unambiguous spelling. Text is at most MAX_TEXT characters,
which bounds every cost. Pure: no settings, no clock.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import NoReturn

from django.utils.translation import gettext_lazy as _

from distcron_app.errors import TimetableError
from distcron_app.timetable.hashing import stable_number

__all__ = ["FIELDS", "MAX_TEXT", "CronFields", "Field", "Term", "canonical", "terms"]

MAX_TEXT = 200
_ALIASES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
_MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]
_WEEKDAYS = ["sun", "mon", "tue", "wed", "thu", "fri", "sat"]
_UNEXPECTED = re.compile(r"[^ \ta-zA-Z0-9*,/#?@-]")
_TERM = re.compile(r"(\*|[0-9a-z]+)(?:-([0-9a-z]+))?(?:/([0-9]+))?")
_HASHED = re.compile(r"[hr](?:\(([0-9]{1,2})-([0-9]{1,2})\))?(?:/([0-9]{1,2}))?")
_EVERY = re.compile(r"@every (?:([0-9]{1,5})h)?(?:([0-9]{1,6})m)?(?:([0-9]{1,8})s)?")
_SPECIAL = re.compile(r"l([0-7])?|([0-9a-z]+)#([0-9]+)")


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """One of the five fields: its label in messages and the numbers that it takes.

    Compared by identity, since to compare labels would translate them.
    """

    label: object
    first: int
    last: int
    names: tuple[str, ...] = ()

    @property
    def top(self) -> int:
        """Return the last number to suggest; weekday 7 is another name of 0."""
        return 6 if self.last == 7 else self.last


FIELDS = (
    Field(_("Minute"), 0, 59),
    Field(_("Hour"), 0, 23),
    Field(_("Day"), 1, 31),
    Field(_("Month"), 1, 12, tuple(_MONTHS)),
    Field(_("Weekday"), 0, 7, tuple(_WEEKDAYS)),
)
_DAY, _WEEKDAY = FIELDS[2], FIELDS[4]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One checked term. ``numeric`` is its text in digits; empty for L, L5 and 5#3.

    ``nth`` is the n of ``5#3``, or 0 for the last (``L``, ``L5``); None otherwise.
    """

    text: str
    numeric: str = ""
    number: int = 0
    nth: int | None = None


@dataclass(frozen=True, slots=True)
class _Token:
    """A part of the text and its place, for messages."""

    field: Field
    text: str
    position: int

    def refuse(self, message: object, **facts: object) -> NoReturn:
        """Raise TimetableError with ``message``, a lazy translation with named placeholders."""
        facts |= {"field": self.field.label, "token": self.text[:40]}
        raise TimetableError(
            "cron", str(message) % facts, token=self.text[:40], position=self.position
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class CronFields:
    """The numbers that a rule means. Weekdays count from Sunday = 0.

    ``nth_weekdays`` holds (weekday, n). ``day_or`` says that a date needs to satisfy
    only one of the day and weekday fields; ``wildcard`` that the rule follows the local
    clock through gaps and folds.
    """

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    last_day: bool
    nth_weekdays: frozenset[tuple[int, int]]
    last_weekdays: frozenset[int]
    wildcard: bool
    day_or: bool


def canonical(expression: str, *, spread_key: str = "") -> str:
    """Return the rule in lower case, one blank between five fields, aliases expanded.

    Leading zeros go; names stay. Idempotent. Raise TimetableError naming the token at
    fault, the fix, and the token's offset: in the text with blanks collapsed, or for a
    character outside the grammar in the text as given. For H and R the fix is a number
    that is always the same for ``spread_key``, such as the name of the schedule.

    >>> canonical("  00 09 * jAn  MON-fri ")
    '0 9 * jan mon-fri'
    >>> canonical("@weekly")
    '0 0 * * 0'
    """
    return " ".join(
        ",".join(term.text for term in field)
        for field in terms(_normalised(expression, spread_key))
    )


@functools.lru_cache(maxsize=4096)
def terms(text: str) -> tuple[tuple[Term, ...], ...]:
    """Return the checked terms of the five fields of normalised or canonical ``text``."""
    parts = text.split(" ")
    if len(parts) != len(FIELDS):
        _refuse_field_count(text, len(parts))
    checked = []
    position = 0
    for field, part in zip(FIELDS, parts, strict=True):
        checked.append(_column(field, part) or _field_terms(field, part, position))
        position += len(part) + 1
    return tuple(checked)


def _normalised(expression: str, spread_key: str) -> str:
    if not isinstance(expression, str):
        message = _("Cron rule %(value)r: not text. Write it as a string of five fields.")
        raise TimetableError("cron", message % {"value": str(expression)[:40]})
    if len(expression) > MAX_TEXT:
        message = _("Cron rule: %(length)d characters, at most %(limit)d. Use several schedules.")
        raise TimetableError("cron", message % {"length": len(expression), "limit": MAX_TEXT})
    _refuse_hashed(expression, spread_key)
    strange = _UNEXPECTED.search(expression)
    if strange:
        message = _(
            "Cron rule: unexpected character %(token)r. "
            "Use digits, names such as jan or mon, and * , - / # L."
        )
        token = strange.group()
        raise TimetableError(
            "cron", message % {"token": token}, token=token, position=strange.start()
        )
    text = " ".join(expression.lower().split())
    return _alias(text) if text.startswith("@") else text


def _refuse_hashed(expression: str, spread_key: str) -> None:
    """Raise TimetableError if a field is left to a hash or to chance, as Jenkins' H."""
    parts = expression.lower().split()
    position = 0
    for index, (field, part) in enumerate(zip(FIELDS, parts, strict=False)):
        hashed = _HASHED.fullmatch(part)
        if hashed and len(parts) == len(FIELDS):
            fix = _stable_field(field, hashed, f"{spread_key} {' '.join(parts)} {index}")
            _Token(field, part, position).refuse(
                _(
                    "%(field)s %(token)r: not supported, since nodes could compute different "
                    "times. Write %(fix)s."
                ),
                fix=fix,
            )
        position += len(part) + 1


def _stable_field(field: Field, hashed: re.Match[str], key: str) -> str:
    """Return the text that stands for H, H(1-5), H/15 or H(0-29)/10, the same for each key."""
    low, high, step = (int(group) if group else None for group in hashed.groups())
    # No day after the 28th: it would not come every month.
    top = 28 if field is _DAY else field.top
    first = low if low is not None and field.first <= low <= top else field.first
    last = high if high is not None and first <= high <= top else top
    if step and first + step + step - 1 <= last:
        return f"{first + stable_number(key, step)}-{last}/{step}"
    return str(first + stable_number(key, last - first + 1))


def _alias(text: str) -> str:
    if text in _ALIASES:
        return _ALIASES[text]
    word = text.split(" ")[0]
    if word == "@reboot":
        message = _("Cron rule %(token)r: names no time. Write five fields, or choose 'once'.")
    elif word == "@every":
        message = _(
            "Cron rule %(token)r: not supported. Choose an interval: every %(seconds)s seconds."
        )
    else:
        message = _("Cron rule %(token)r: not known. Use %(aliases)s, or five fields.")
    aliases = ", ".join(_ALIASES)
    facts = {"token": word[:40], "aliases": aliases, "seconds": _seconds_of(text) or "N"}
    raise TimetableError("cron", message % facts, token=word[:40], position=0)


def _seconds_of(text: str) -> int:
    """Return the seconds of "@every 1h30m", or 0 if it is not understood."""
    matched = _EVERY.fullmatch(text)
    if matched is None:
        return 0
    hours, minutes, seconds = (int(group or 0) for group in matched.groups())
    return hours * 3600 + minutes * 60 + seconds


def _refuse_field_count(text: str, count: int) -> NoReturn:
    if not text:
        message = _("Cron rule: empty. Write five fields: minute hour day month weekday.")
    elif count < len(FIELDS):
        message = _(
            "Cron rule: five fields expected, got %(count)d. "
            "Write minute hour day month weekday, and * for any."
        )
        if count == len(FIELDS) - 1:
            message = _(
                "Cron rule: five fields expected, got %(count)d. Is the weekday missing? "
                "Write minute hour day month weekday, and * for any."
            )
    else:
        message = _(
            "Cron rule: five fields expected, got %(count)d: minute hour day month weekday. "
            "Seconds are not part of the rule; choose an interval (every N seconds) instead."
        )
    raise TimetableError("cron", message % {"count": count}, token=text[:40])


@functools.lru_cache(maxsize=4096)
def _column(field: Field, part: str) -> tuple[Term, ...] | None:
    """Return the terms of a field, wherever it stands; None if it is to be refused there."""
    try:
        return _field_terms(field, part, 0)
    except TimetableError:
        return None


def _field_terms(field: Field, part: str, position: int) -> tuple[Term, ...]:
    found = []
    offset = position
    for piece in part.split(","):
        found.append(_term(_Token(field, piece, offset)))
        offset += len(piece) + 1
    special = [term for term in found if term.nth is not None]
    if field is _WEEKDAY and special and len(special) < len(found):
        _Token(field, part, position).refuse(
            _(
                "%(field)s %(token)r: mixes plain weekdays with # or L. "
                "Use two schedules, or # for each."
            )
        )
    return tuple(found)


def _term(token: _Token) -> Term:
    if not token.text:
        token.refuse(_("%(field)s: empty item in the list. Remove the comma that is too much."))
    special = _SPECIAL.fullmatch(token.text)
    if special and token.field in (_DAY, _WEEKDAY):
        return _special_term(token, *special.groups())
    matched = _TERM.fullmatch(token.text)
    if matched is None or not _is_number(token.field, matched[1], star=True):
        _refuse_spelling(token)
    first, last, step = matched.groups()
    if first == "*":
        return _star_term(token, last, step)
    if last is None:
        return _single_term(token, first, step)
    return _range_term(token, first, last, step)


def _special_term(token: _Token, last: str | None, day: str | None, nth: str | None) -> Term:
    if day is None and (token.field is _DAY) is (last is None):
        number = int(last) % 7 if last else 0
        return Term(text=token.text, number=number, nth=0)
    if day is None or nth is None or token.field is _DAY:
        _refuse_spelling(token)
    if not 1 <= int(nth[:9]) <= 5:
        token.refuse(_("%(field)s %(token)r: the number after # must be 1 to 5."))
    number = _number(token, day)
    name = day if day in _WEEKDAY.names else str(number)
    return Term(text=f"{name}#{int(nth)}", number=number % 7, nth=int(nth))


def _star_term(token: _Token, last: str | None, step: str | None) -> Term:
    if last is not None:
        _refuse_spelling(token)
    if step is None:
        return Term(text="*", numeric="*")
    text = f"*/{_step(token, step, token.field.last)}"
    return Term(text=text, numeric=text)


def _single_term(token: _Token, first: str, step: str | None) -> Term:
    number = _number(token, first)
    if step is not None:
        top = token.field.top
        fix = f"{first}-{top}/{int(step[:9])}" if number < top else str(number)
        token.refuse(
            _("%(field)s %(token)r: read differently by cron programs. Write %(fix)s."), fix=fix
        )
    return Term(text=_spelled(token, first), numeric=str(number), number=number)


def _range_term(token: _Token, first: str, last: str, step: str | None) -> Term:
    low, high = _number(token, first), _number(token, last)
    if last == "sun" != first:  # the end of a week that starts on Monday
        high = 7
    if low == high:
        token.refuse(_("%(field)s %(token)r: both ends are equal. Write %(fix)s."), fix=first)
    if low > high:
        fix = _unwrapped(token.field, low, high, int(step[:9]) if step else 1)
        token.refuse(_("%(field)s %(token)r: runs backwards. Write %(fix)s."), fix=fix)
    ending = f"/{_step(token, step, high - low)}" if step else ""
    return Term(
        text=f"{_spelled(token, first)}-{_spelled(token, last)}{ending}",
        numeric=f"{low}-{high}{ending}",
    )


def _unwrapped(field: Field, low: int, high: int, step: int) -> str:
    size = field.top - field.first + 1
    if low > field.top:  # weekday 7 is the start of the week
        low -= size
        return (f"{low}-{high}" + (f"/{step}" if step > 1 else "")) if low < high else str(low)
    if step != 1:
        span = range(low, high + size + 1, max(step, 1))
        return ",".join(str((number - field.first) % size + field.first) for number in span)
    halves = ((low, field.top), (field.first, high))
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in halves)


def _step(token: _Token, step: str, largest: int) -> int:
    number = int(step[:9])
    if number == 0:
        token.refuse(_("%(field)s %(token)r: the step must be 1 or more."))
    if number > largest:
        token.refuse(
            _("%(field)s %(token)r: step larger than the range. Use at most %(largest)d."),
            largest=largest,
        )
    return number


def _spelled(token: _Token, word: str) -> str:
    return word if word in token.field.names else str(int(word))


def _is_number(field: Field, word: str, *, star: bool = False) -> bool:
    return word.isdigit() or word in field.names or (star and word == "*")


def _number(token: _Token, word: str) -> int:
    field = token.field
    if not _is_number(field, word):
        _refuse_spelling(token)
    if word in field.names:
        return field.first + field.names.index(word)
    if len(word) > 2 or not field.first <= int(word) <= field.last:
        token.refuse(
            _("%(field)s %(token)r: must be from %(first)d to %(last)d, in at most two digits."),
            first=field.first,
            last=field.last,
        )
    return int(word)


def _refuse_spelling(token: _Token) -> NoReturn:
    text, field = token.text, token.field
    full_name = next((name for name in field.names if text.startswith(name)), None)
    if full_name and text.isalpha():
        token.refuse(_("%(field)s %(token)r: unexpected word. Write %(fix)s."), fix=full_name)
    if text == "?":
        token.refuse(_("%(field)s %(token)r: not supported. Write * for any."))
    if re.match(r"[hr](/|$)", text):
        token.refuse(
            _(
                "%(field)s %(token)r: not supported, since nodes could compute different times. "
                "Write a fixed number."
            )
        )
    if re.fullmatch(r"[0-7]l", text) and field is _WEEKDAY:
        token.refuse(_("%(field)s %(token)r: write %(fix)s."), fix=f"L{text[0]}")
    if field is _DAY and "w" in text:
        token.refuse(
            _(
                "%(field)s %(token)r: nearest weekdays are not supported. "
                "Write a day, or L for the last day of the month."
            )
        )
    token.refuse(_("%(field)s %(token)r: unexpected. Write %(example)s."), example=_example(field))


def _example(field: Field) -> str:
    if field is _DAY:
        return "*, 15, 1-7, */2, L"
    if field is _WEEKDAY:
        return "*, 1-5, mon, 5#3, L5"
    return f"*, {field.first}, {field.first}-{field.last}, */2"
