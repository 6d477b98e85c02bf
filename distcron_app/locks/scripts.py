"""The Lua scripts of a lock in Redis, the keys they work on, and what their answers mean.

A lock is a string key with a TTL. Its value is
``<owner token>|<granted at>|<granted TTL>|<renewals>|<note>``, times in milliseconds, the
instant by the clock of Redis and that of the first grant. A sorted set lists the keys by
their expiry, so that finding all locks needs neither KEYS nor SCAN.

All keys of a namespace carry one hash tag, ``{<namespace>:lock}``, and so live in one slot
of a Redis Cluster: a batch is one script and one round trip, and its index cannot be apart
from it. Namespaces spread over the shards. One shard does well over 100,000 locks a second,
more than all nodes of a namespace ask for, so a batch that is cut up by slots would only
wait for more round trips.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Sequence
from typing import Any

from distcron_app.locks.base import LockInfo

__all__ = [
    "ACQUIRE",
    "FORCE_RELEASE",
    "INSPECT",
    "RELEASE",
    "RENEW",
    "Call",
    "Owner",
    "Script",
    "calls",
    "holder",
    "index_key",
    "infos",
    "lock_key",
    "lock_name",
    "probe_key",
]

# Names in one call of a script, which blocks Redis while it runs: about 2 ms for 500.
_CHUNK = 500

_NUMBER = "([0-9]{1,16})"
_VALUE = re.compile(rf"([^|]*)\|{_NUMBER}\|{_NUMBER}\|{_NUMBER}\|(.*)", re.DOTALL)

# A name and its owner token.
Owner = tuple[str, str]


class Script:
    """A script and the name that Redis gives it."""

    __slots__ = ("sha", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        # A name, not a protection.
        self.sha = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """One script on up to 500 names: the first ``key_count`` of ``values`` are its keys."""

    script: Script
    key_count: int
    values: list[str | bytes]


# The first lines of a script that writes to the index. Lua prints numbers of up to 14
# digits exactly, so instants in milliseconds need no format until the year 5138; as text
# they are cheaper to hand over than as numbers.
_TIMES = """
local call = redis.call
local time = call('TIME')
local now = time[1] * 1000 + (time[2] - time[2] % 1000) / 1000
local expiry = '' .. now + ARGV[1]
now = '' .. now
local listed = {}
"""
# Its last ones. One ZADD for many keys costs half of one ZADD each; unpack() can put
# some thousands of values on Lua's stack.
_INDEX = """
for first = 1, #listed, 1000 do
  call('ZADD', KEYS[1], unpack(listed, first, math.min(first + 999, #listed)))
end
call('ZREMRANGEBYSCORE', KEYS[1], '-inf', '(' .. now)
"""

# KEYS[1] index; KEYS[2..n] lock keys
# ARGV[1] TTL in ms; ARGV[2] note; ARGV[3..n+1] owner tokens, in the order of the keys
# Returns for each key 1 (won, or already held under this token) or the owner token of its
# holder, which is '' where a foreign hand put something else there.
# Atomic, since the key may expire or change between SET, GET and PEXPIRE, and an index
# that misses a held key hides it from operators.
# SET comes first: most keys are free, and with its memory full Redis refuses only a
# script's first write. pcall, since a planted key of another type must not fail the batch.
ACQUIRE = Script(
    _TIMES
    + """
local rest = '|' .. now .. '|' .. ARGV[1] .. '|0|' .. ARGV[2]
local answers = {}
for i = 2, #KEYS do
  local token = ARGV[i + 1]
  local answer = 1
  if not call('SET', KEYS[i], token .. rest, 'NX', 'PX', ARGV[1]) then
    local value = redis.pcall('GET', KEYS[i])
    answer = type(value) == 'string' and string.match(value, '^[^|]*') or ''
    if answer == token then
      call('PEXPIRE', KEYS[i], ARGV[1])
      answer = 1
    end
  end
  if answer == 1 then
    listed[#listed + 1] = expiry
    listed[#listed + 1] = KEYS[i]
  end
  answers[i - 1] = answer
end
"""
    + _INDEX
    + "return answers\n"
)

# KEYS[1] index; KEYS[2..n] lock keys
# ARGV[1] TTL in ms; ARGV[2..n] owner tokens
# Returns 1 (extended) or 0 (gone, or somebody else's) for each key.
# Atomic, since the lock may expire and be won by another node between GET and PEXPIRE.
# PEXPIRE comes first: it needs no memory, and what follows it may then exceed the limit.
# The instant of the first grant stays, so that the age is that of the lock.
RENEW = Script(
    _TIMES
    + """
local ours = {}
for i = 2, #KEYS do
  local value = redis.pcall('GET', KEYS[i])
  ours[i - 1] = 0
  if type(value) == 'string' and string.match(value, '^[^|]*') == ARGV[i] then
    call('PEXPIRE', KEYS[i], ARGV[1])
    local first, renewals, note = string.match(value, '^([^|]*|%d+|)%d+|(%d+)(|.*)$')
    if first then
      value = first .. ARGV[1] .. '|' .. renewals + 1 .. note
      call('SET', KEYS[i], value, 'KEEPTTL')
    end
    listed[#listed + 1] = expiry
    listed[#listed + 1] = KEYS[i]
    ours[i - 1] = 1
  end
end
"""
    + _INDEX
    + "return ours\n"
)

# KEYS[1] index; KEYS[2..n] lock keys
# ARGV[1..n-1] owner tokens
# Returns 1 (deleted) or 0 (gone, or somebody else's) for each key.
# Atomic, since between GET and DEL the lock may pass to another node, whose lock
# would then be deleted. Only commands that Redis accepts with its memory full.
RELEASE = Script(
    """
local released = {}
for i = 2, #KEYS do
  local value = redis.pcall('GET', KEYS[i])
  released[i - 1] = 0
  if type(value) == 'string' and string.match(value, '^[^|]*') == ARGV[i - 1] then
    redis.call('DEL', KEYS[i])
    redis.call('ZREM', KEYS[1], KEYS[i])
    released[i - 1] = 1
  end
end
return released
"""
)

# KEYS[1] index; KEYS[2..n] lock keys
# ARGV as for RELEASE, unused
# Returns 1 (there was a lock) or 0 for each key, whoever owned it.
# Atomic, so that the index never lists a lock that an operator saw go.
FORCE_RELEASE = Script(
    """
local released = {}
for i = 2, #KEYS do
  released[i - 1] = redis.call('DEL', KEYS[i])
  redis.call('ZREM', KEYS[1], KEYS[i])
end
return released
"""
)

# KEYS[1] index (unused, so that all scripts are called alike); KEYS[2..n] lock keys
# ARGV as for RELEASE, unused
# Returns for each key {value or false, TTL in ms, now in ms}; TTL -1 never expires, -2 absent.
# Atomic, so that value, TTL and age belong to the same owner.
INSPECT = Script(
    """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local found = {}
for i = 2, #KEYS do
  local value = redis.pcall('GET', KEYS[i])
  if type(value) ~= 'string' then value = false end
  found[i - 1] = {value, redis.call('PTTL', KEYS[i]), now}
end
return found
"""
)


def lock_key(namespace: str, name: str) -> str:
    """Return the key of the lock ``name``.

    >>> lock_key("distcron", "schedule:42")
    '{distcron:lock}:schedule:42'
    """
    return f"{{{namespace}:lock}}:{name}"


def lock_name(namespace: str, key: bytes | str) -> str:
    """Return the name of the lock at ``key``, as the index lists it.

    >>> lock_name("distcron", b"{distcron:lock}:schedule:42")
    'schedule:42'
    """
    return _text(key).removeprefix(lock_key(namespace, ""))


def index_key(namespace: str) -> str:
    """Return the key of the sorted set of all locks; no lock's name leads to it."""
    return f"{{{namespace}:lock}}-index"


def probe_key(namespace: str) -> str:
    """Return the key that is written to learn whether Redis accepts writes."""
    return f"{{{namespace}:lock}}-probe"


def calls(
    script: Script, namespace: str, owners: Sequence[Owner], *head: str | bytes
) -> Iterator[Call]:
    """Yield the calls that run ``script`` over all owners, in their order.

    ``head`` are the script's arguments ahead of the tokens. Every call may be repeated:
    under the same tokens a second run changes nothing but the TTL and the renewals.
    """
    index = index_key(namespace)
    prefix = lock_key(namespace, "")
    for start in range(0, len(owners), _CHUNK):
        chunk = owners[start : start + _CHUNK]
        keys: list[str | bytes] = [index]
        keys += [prefix + name for name, _ in chunk]
        yield Call(script, len(keys), [*keys, *head, *[token for _, token in chunk]])


def holder(answer: Any) -> str | None:
    """Return who holds a lock by an answer of ACQUIRE; None where it was won."""
    return None if answer == 1 else _text(answer)


def infos(names: Sequence[str], answers: Sequence[Any]) -> dict[str, LockInfo]:
    """Return the held ones of ``names`` by the answers of INSPECT."""
    return {
        name: _info(name, _text(value or b""), ttl_ms, now_ms)
        for name, (value, ttl_ms, now_ms) in zip(names, answers, strict=True)
        if ttl_ms != -2
    }


def _info(name: str, value: str, ttl_ms: int, now_ms: int) -> LockInfo:
    found = _VALUE.fullmatch(value)
    if found is None:
        token, _, note = value.partition("|")
        granted_at = granted_ms = renewals = None
    else:
        token, *facts, note = found.groups()
        granted_at, granted_ms, renewals = map(int, facts)
    return LockInfo(
        name=name,
        owner_token=token or None,
        note=note,
        ttl_ms=None if ttl_ms < 0 else ttl_ms,
        granted_ms=granted_ms,
        # The clock of Redis may be set back.
        age_ms=None if granted_at is None else max(0, now_ms - granted_at),
        renewals=renewals,
    )


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
