"""The registry of jobs: the only callables that a schedule can name.

    from distcron_app import job

    @job
    def nightly_report(day: date, language: Literal["en", "id"] = "en") -> None:
        "Mail the report of one day."

The name of that job in ``billing/jobs.py`` is ``billing.nightly_report``: the dotted
path of the module, without a last part ``jobs``, then the function's name. The
database stores the name; resolving it is a dict lookup, so a name typed by a person
never imports or evaluates anything.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, overload

from django.utils.module_loading import autodiscover_modules
from django.utils.translation import gettext as _

from distcron_app.arguments import (
    Parameter,
    Signature,
    json_problem,
    masked_arguments,
    read_signature,
    to_json,
)
from distcron_app.definitions import Definition
from distcron_app.errors import DuplicateJob, InvalidArguments, UnknownJob

__all__ = [
    "WHOLE",
    "Job",
    "Parameter",
    "all_jobs",
    "autodiscover",
    "get",
    "job",
    "masked_arguments",
    "names",
]

NAME_LENGTH = 100
# Key in InvalidArguments.problems for what concerns no single parameter.
WHOLE = "*"

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,99}")
_jobs: dict[str, Job] = {}
_registering = threading.Lock()

F = TypeVar("F", bound=Callable[..., Any])
Validator = Callable[..., object]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A registered callable with what its signature and docstring say about it.

    ``permission`` is what a user needs to schedule or run it ("app.codename"), None
    for no more than the schedule's own. ``source`` is "module:line". ``schedules`` are
    those that the code brings with it.
    """

    name: str
    function: Callable[..., Any]
    summary: str
    signature: Signature
    is_async: bool
    source: str
    permission: str | None = None
    validate: Validator | None = None
    schedules: tuple[Definition, ...] = ()

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """Return the arguments in the order of the signature, without the context."""
        return self.signature.parameters

    @property
    def accepts_extra(self) -> bool:
        """Tell whether ``**kwargs`` takes names that are not parameters."""
        return self.signature.accepts_extra

    @property
    def takes_context(self) -> bool:
        """Tell whether the callable asks for the JobContext."""
        return self.signature.context_parameter is not None

    def check(self, arguments: object) -> dict[str, Any]:
        """Return the values to call the job with; defaults are not filled in.

        Raise InvalidArguments with every problem, by parameter, ``"*"`` for the whole.
        """
        if problem := json_problem(arguments):
            raise InvalidArguments(self.name, {WHOLE: problem})
        assert isinstance(arguments, dict)  # noqa: S101 - json_problem refused the rest
        known = {parameter.name: parameter for parameter in self.parameters}
        problems = self._missing(arguments)
        values: dict[str, Any] = {}
        for name, value in arguments.items():
            try:
                values[name] = known[name].type.convert(value) if name in known else value
                self._refuse_unknown(name, known)
            except ValueError as error:
                problems[name] = str(error)
        problems = problems or self._own_problems(values)
        if problems:
            raise InvalidArguments(self.name, problems)
        return values

    def dump(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the JSON form of ``arguments``, which may hold Python values.

        Raise InvalidArguments as ``check`` does. Defaults are not filled in.
        """
        try:
            form = to_json(arguments)
        except RecursionError:
            raise InvalidArguments(self.name, {WHOLE: _("must not contain itself.")}) from None
        self.check(form)
        return dict(form)

    def parse(self, text: str) -> dict[str, Any]:
        """Return the JSON form of arguments typed as JSON text.

        Raise InvalidArguments as ``check`` does, also for a name given twice.
        """
        try:
            arguments = json.loads(text or "{}", object_pairs_hook=_unique_pairs)
        except json.JSONDecodeError as error:
            message = _("must be JSON: %(problem)s at line %(line)s, column %(column)s.")
            facts = {"problem": error.msg, "line": error.lineno, "column": error.colno}
            raise InvalidArguments(self.name, {WHOLE: message % facts}) from error
        except (ValueError, RecursionError) as error:
            raise InvalidArguments(self.name, {WHOLE: str(error)}) from error
        self.check(arguments)
        return dict(arguments)

    def _missing(self, arguments: dict[str, Any]) -> dict[str, str]:
        return {
            parameter.name: _("is required.")
            for parameter in self.parameters
            if parameter.is_required and parameter.name not in arguments
        }

    def _refuse_unknown(self, name: str, known: Mapping[str, Parameter]) -> None:
        if name == self.signature.context_parameter:
            raise ValueError(_("is filled by the scheduler. Remove it."))
        if name in known or self.accepts_extra:
            return
        nearest = difflib.get_close_matches(name[:NAME_LENGTH], known, n=1, cutoff=0.5)
        if nearest:
            raise ValueError(_("is not a parameter. Did you mean %r?") % nearest[0])
        allowed = ", ".join(known) or _("none")
        raise ValueError(_("is not a parameter. Allowed: %s.") % allowed)

    def _own_problems(self, values: dict[str, Any]) -> dict[str, str]:
        if self.validate is None:
            return {}
        try:
            self.validate(**values)
        except InvalidArguments as error:
            return {name: str(message) for name, message in error.problems.items()}
        except ValueError as error:
            return {WHOLE: str(error)}
        return {}


@overload
def job(function: F, /) -> F: ...
@overload
def job(
    *,
    name: str | None = None,
    permission: str | None = None,
    validate: Validator | None = None,
    schedule: Definition | Sequence[Definition] = (),
) -> Callable[[F], F]: ...
def job(
    function: F | None = None,
    *,
    name: str | None = None,
    permission: str | None = None,
    validate: Validator | None = None,
    schedule: Definition | Sequence[Definition] = (),
) -> F | Callable[[F], F]:
    """Register a callable as a job, and return it unchanged.

    ``schedule`` is when it runs, by ``cron()``, ``every()`` or ``once()``, or several of
    them; ``migrate`` and ``schedulerctl sync`` make rows of it.
    ``validate`` gets the converted arguments by name, at save and again at start,
    and raises ValueError (or InvalidArguments, to name parameters) to refuse them.
    Raise DuplicateJob when another callable has the name, ValueError for a name that
    is not 1 to 100 letters, digits, dots, underscores and hyphens after a letter,
    TypeError for a callable that cannot be a job.
    """

    def register(registered: F) -> F:
        label = name if name is not None else _default_name(registered)
        described = _describe(registered, label, permission, validate)
        _add(dataclasses.replace(described, schedules=_definitions(label, schedule)))
        return registered

    return register if function is None else register(function)


def get(name: str) -> Job:
    """Return the job of that name. Raise UnknownJob, with similar names, for none."""
    found = _jobs.get(name) if isinstance(name, str) else None
    if found is None:
        raise UnknownJob(*_unknown(str(name)))
    return found


def names() -> list[str]:
    """Return the names of all jobs, sorted."""
    return sorted(_jobs)


def all_jobs() -> list[Job]:
    """Return all jobs, sorted by name."""
    return [_jobs[name] for name in names()]


def autodiscover() -> None:
    """Import the module ``jobs`` of every installed app that has one."""
    autodiscover_modules("jobs")


def _default_name(function: Callable[..., Any]) -> str:
    own_name = getattr(function, "__name__", "")
    if not own_name or own_name == "<lambda>":
        raise TypeError(f"Job {function!r}: has no name of its own. Pass @job(name=...).")
    return f"{function.__module__.removesuffix('.jobs')}.{own_name}"


def _describe(
    function: Callable[..., Any],
    name: str,
    permission: str | None,
    validate: Validator | None,
) -> Job:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"Job {name!r}: not a valid name. Use 1 to {NAME_LENGTH} letters, digits, '.', '_' "
            "and '-', starting with a letter."
        )
    plain = inspect.unwrap(function)
    if inspect.isgeneratorfunction(plain) or inspect.isasyncgenfunction(plain):
        raise TypeError(f"Job {name!r}: is a generator, whose body would never run. Return a list.")
    return Job(
        name=name,
        function=function,
        summary=(inspect.getdoc(function) or "").partition("\n")[0].strip(),
        signature=read_signature(function, name),
        is_async=inspect.iscoroutinefunction(plain),
        source=f"{function.__module__}:{_line(plain)}",
        permission=permission,
        validate=validate,
    )


def _definitions(name: str, given: Definition | Sequence[Definition]) -> tuple[Definition, ...]:
    several = (given,) if isinstance(given, Definition) else given
    if isinstance(several, Sequence) and all(isinstance(each, Definition) for each in several):
        return tuple(several)
    raise TypeError(
        f"Job {name!r}: got the schedule {given!r}. Use cron(), every() or once(), or a list of "
        "them."
    )


def _line(function: Callable[..., Any]) -> int:
    code = getattr(function, "__code__", None)
    return 0 if code is None else int(code.co_firstlineno)


def _add(described: Job) -> None:
    with _registering:
        holder = _jobs.get(described.name)
        # A reload brings the same function again as a new object.
        if holder is not None and _identity(holder) != _identity(described):
            raise DuplicateJob(described.name, holder.source, described.source)
        _jobs[described.name] = described


def _identity(described: Job) -> tuple[str, str]:
    function = described.function
    return function.__module__, getattr(function, "__qualname__", repr(function))


def _unknown(name: str) -> tuple[str, tuple[str, ...]]:
    # A name of a megabyte would fill the log, and comparing it would take seconds.
    short = name if len(name) <= NAME_LENGTH else f"{name[:NAME_LENGTH]}…"
    last_part = short.rpartition(".")[2]
    same_end = [each for each in names() if each.rpartition(".")[2] == last_part]
    similar = difflib.get_close_matches(short, _jobs, n=3, cutoff=0.8)
    return short, tuple(dict.fromkeys([*same_end, *similar]))[:3]


def _unique_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    unique = dict(pairs)
    if len(unique) < len(pairs):
        given = [name for name, _value in pairs]
        twice = next(name for name in given if given.count(name) > 1)
        raise ValueError(_("must not give %r twice.") % twice)
    return unique
