"""Concurrency keys: which schedules and arguments count as one for overlapping runs.

A key is a template such as ``invoices-{customer}``. With the arguments of a run filled in
it names the scope of that run. Pure, and it never fails for a stored template: what cannot
be filled in stays as it is written, so that such runs share one scope.
"""

from __future__ import annotations

import functools
import hashlib
import json
import string
from collections.abc import Mapping
from typing import Any

from django.utils.translation import gettext as _

from distcron_app import registry
from distcron_app.arguments import is_secret_name, to_json
from distcron_app.errors import UnknownJob

__all__ = ["MAX_KEY_LENGTH", "key_problem", "rendered_key"]

MAX_KEY_LENGTH = 200
_HASH_LENGTH = 32
# Literal text, then the name of an argument or None.
_Parts = tuple[tuple[str, str | None], ...]


def rendered_key(template: str, job: str, arguments: Mapping[str, Any]) -> str:
    """Return the key with the arguments filled in, or the job's defaults for those not given.

    At most ``MAX_KEY_LENGTH`` characters: a longer one keeps its beginning, with a hash of
    all of it. Lists and objects are filled in as a hash. Empty for an empty template.
    """
    try:
        parts = _parts(template)
    except ValueError:
        parts = ((template, None),)
    if all(name is None for _literal, name in parts):
        return _bounded("".join(literal for literal, _name in parts))
    defaults = _defaults(job)
    return _bounded(
        "".join(literal + _filled(name, arguments, defaults) for literal, name in parts)
    )


def key_problem(template: str, job: registry.Job, arguments: Mapping[str, Any]) -> str:
    """Return why the template cannot be used with the job, in words; empty where it can."""
    try:
        names = [name for _literal, name in _parts(template) if name is not None]
    except ValueError:
        return _(
            "Only arguments in braces can be filled in, such as {customer}: no attributes, "
            "indexes, formats or empty braces. Write {{ and }} for the characters themselves."
        )
    known = {each.name: each for each in job.parameters}
    given = [name for name in arguments if name not in known] if job.accepts_extra else []
    allowed = [name for name in (*known, *given) if not is_secret_name(name)]
    for name in names:
        if name in allowed:
            continue
        facts = {"name": name, "allowed": ", ".join(allowed) or _("none")}
        if is_secret_name(name):
            message = _("{%(name)s} is secret, and the key is shown. Allowed: %(allowed)s.")
        else:
            message = _("{%(name)s} is no argument of the job. Allowed: %(allowed)s.")
        return message % facts
    return ""


@functools.lru_cache(maxsize=1024)
def _parts(template: str) -> _Parts:
    """Return the parts of a template. Raise ValueError for more than names in braces."""
    found: list[tuple[str, str | None]] = []
    for literal, name, spec, conversion in string.Formatter().parse(template):
        if spec or conversion or (name is not None and not name.isidentifier()):
            raise ValueError(template)
        found.append((literal, name))
    written = "".join(
        _escaped(literal) + ("" if name is None else f"{{{name}}}") for literal, name in found
    )
    if written != template:
        # "{customer:}" looks like a format, and parses as none.
        raise ValueError(template)
    return tuple(found)


def _escaped(literal: str) -> str:
    return literal.replace("{", "{{").replace("}", "}}")


def _defaults(job: str) -> dict[str, Any]:
    try:
        parameters = registry.get(job).parameters
    except UnknownJob:
        return {}
    return {each.name: to_json(each.default) for each in parameters if not each.is_required}


def _filled(name: str | None, arguments: Mapping[str, Any], defaults: Mapping[str, Any]) -> str:
    if name is None:
        return ""
    if name not in arguments and name not in defaults:
        return f"{{{name}}}"
    value = arguments[name] if name in arguments else defaults[name]
    if isinstance(value, str):
        return value
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return f"#{_hash(text)}" if isinstance(value, list | dict) else text


def _bounded(key: str) -> str:
    if len(key) <= MAX_KEY_LENGTH:
        return key
    return f"{key[: MAX_KEY_LENGTH - _HASH_LENGTH - 1]}…{_hash(key)}"


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:_HASH_LENGTH]
