"""Locks held by a majority of several independent Redis instances, the Redlock algorithm."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import random
import re
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import redis
from django.utils.translation import gettext as _

from distcron_app.clock import Clock
from distcron_app.errors import LockUnavailable
from distcron_app.locks.base import Lease, LockBackend, LockInfo, checked_ttl
from distcron_app.locks.fanout import Fanout, Instance, Patience, Reply, Request
from distcron_app.locks.scripts import (
    ACQUIRE,
    FORCE_RELEASE,
    INSPECT,
    RELEASE,
    RENEW,
    Call,
    Owner,
    Script,
    calls,
    index_key,
    infos,
    lock_name,
    probe_key,
)

__all__ = ["Member", "RedlockBackend", "drift_ms", "lease_end", "quorum_of"]

# Answers to the owners of a request in their order, or why an instance gave none. In an
# answer to ACQUIRE 1 is a vote for us; None is no vote at all.
_Ballot = list[Any] | Exception

# Clock rates of the instances may differ by 1 %, and 2 ms are the precision of their expiry.
_DRIFT_FACTOR = 0.01
_DRIFT_MS = 2
# The pause before a further try is longer or shorter by up to half, so that contenders
# who split the votes do not meet again.
_JITTER = 0.5
# Most abandoned tokens remembered for an instance: the largest batch of the settings.
_ABANDONED_LIMIT = 10_000
# An unused probe is gone after this long.
_PROBE_MS = 1000

# In front of a script: last KEYS the marker, last ARGV the time to keep out in ms.
# Answers KEPTOUT with the marker's age and the ms to go, both by the instance's clock.
# The marker says since when this instance remembers. It has no TTL, so it is missing only
# where locks are missing as well: after a flush, an eviction or a restart without data.
# A marker of the future is that of a clock since set back, and starts anew.
_GUARD = """
local marker, rejoin = table.remove(KEYS), tonumber(table.remove(ARGV))
do
  local time = redis.call('TIME')
  local now = time[1] * 1000 + math.floor(time[2] / 1000)
  local born = redis.pcall('GET', marker)
  born = type(born) == 'string' and tonumber(born)
  if not born or born > now then
    redis.call('SET', marker, string.format('%.0f', now))
    born = now
  end
  if now < born + rejoin then
    return redis.error_reply(string.format('KEPTOUT %.0f %.0f', now - born, born + rejoin - now))
  end
end
"""
_KEPT_OUT = re.compile(r"KEPTOUT (\d+) (\d+)")
_ACQUIRE = Script(_GUARD + ACQUIRE.text)
# Those of every tick, known to each instance before they are needed.
_SCRIPTS = (_ACQUIRE, RENEW, RELEASE)

# KEYS[1] probe; ARGV[1] TTL in ms; then what the guard takes.
# Returns {1} when this instance votes and accepts writes.
_PROBE = Script(_GUARD + "redis.call('SET', KEYS[1], '', 'PX', ARGV[1]) return {1}\n")

# KEYS[1] index. Returns the keys of all locks. A script, so that all calls are alike.
_LIST = Script("return redis.call('ZRANGE', KEYS[1], 0, -1)\n")


def quorum_of(instance_count: int) -> int:
    """Return how many instances are a majority.

    >>> [quorum_of(count) for count in (3, 4, 5)]
    [2, 3, 3]
    """
    return instance_count // 2 + 1


def drift_ms(ttl_ms: int) -> float:
    """Return what clocks of different rate may take off a TTL.

    >>> drift_ms(15_000)
    152.0
    """
    return ttl_ms * _DRIFT_FACTOR + _DRIFT_MS


# Errors after which an instance need not be asked again at once.
_AWAY = (redis.ConnectionError, redis.TimeoutError, OSError)


def lease_end(sent_at: float, ttl_ms: int) -> float:
    """Return when a lease ends whose request was sent at the monotonic second ``sent_at``.

    Before that, what is left of it is the validity.

    >>> lease_end(100.0, 10_000)
    109.898
    """
    return sent_at + (ttl_ms - drift_ms(ttl_ms)) / 1000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One instance as people see it: ``state`` is "up", "down" or "kept out".

    ``cause`` says why it is not up. A kept-out instance answers and does not vote.
    """

    alias: str
    state: str
    cause: str = ""


class RedlockBackend(LockBackend):
    """Locks that a majority of the instances of ``aliases`` grant; a minority may fail.

    1. The request goes to all instances at once.
    2. A name is won where a quorum grants it and validity is left: TTL less the time
       that took, less the drift. The lease ends that early.
    3. What is not won is given up on all instances; on those that did not answer, with
       the next call. Only when nobody has a quorum is there another try, up to
       ``retries`` times after ``retry_delay_ms``, give or take half.
    4. An instance that restarted or lost its data does not vote for ``rejoin_ms``, so no
       TTL may be longer: by then every lock that it forgot has ended.

    The algorithm is that of the Redis documentation, "Distributed Locks with Redis".
    What it cannot promise was shown by Martin Kleppmann, "How to do distributed locking"
    (2016), and disputed by Salvatore Sanfilippo, "Is Redlock safe?" (2016):

    - A holder that is paused (a stopped process, a suspended machine) may wake up after
      its lease and go on. The fencing token covers that: it grows with each grant, and a
      write that carries a smaller one is refused.
    - A clock that is set forward drops locks early. One instance is a minority and
      changes nothing; where a quorum jumps at once, two may hold one lock. The unique row
      of each occurrence in the database covers that: one of the two gets the run.
    - An instance that restarts without being seen to forgets its votes. Its uptime and a
      marker key tell, unless its clock was set forward at the same time. Then too the
      unique row decides.

    ``note`` is stored with each lock for people. A call blocks at most for the largest
    socket timeout of the aliases, twice where something had to be given up, and for the
    pauses between tries. A minority that hangs costs a call as long again as the others
    took. One object must not be used on both sides of a fork.
    """

    name = "redlock"

    def __init__(
        self,
        aliases: Sequence[str],
        namespace: str,
        *,
        rejoin_ms: int,
        retries: int = 3,
        retry_delay_ms: int = 200,
        note: str = "",
        clock: Clock | None = None,
    ) -> None:
        self.quorum = quorum_of(len(aliases))
        self._namespace = namespace
        self._rejoin_ms = rejoin_ms
        self._retries = retries
        self._retry_delay_ms = retry_delay_ms
        self._note = note.encode("utf-8", "replace")
        self._clock = clock or Clock()
        self._voters = tuple(_Voter(alias) for alias in aliases)
        self._fanout = Fanout(aliases, greet=self._greet, clock=self._clock)

    def acquire(self, wanted: Mapping[str, str], ttl_ms: int) -> dict[str, Lease]:
        """Take the locks that a quorum grants, as ``LockBackend.acquire`` promises.

        Raise ValueError when ``ttl_ms`` is longer than restarted instances are kept out.
        """
        self._check_ttl(ttl_ms)
        won: dict[str, Lease] = {}
        split = list(wanted.items())
        for pauses in itertools.count():
            ballots, sent_at = self._vote(split, ttl_ms)
            if split and _answered(ballots) < self.quorum:
                self._give_up(list(wanted.items()), split, ballots)
                raise self._unavailable(ballots)
            expires_at = lease_end(sent_at, ttl_ms)
            in_time = expires_at > self._clock.monotonic()
            granted, lost, undecided = self._tally(split, ballots)
            missed = lost + undecided if in_time else split
            if missed:
                self._give_up(missed, split, ballots)
            if in_time:
                won |= _leases(granted, expires_at)
            split = undecided
            if not split or pauses == self._retries:
                break
            self._pause()
        return {name: won[name] for name in wanted if name in won} if pauses else won

    def renew(self, leases: Collection[Lease], ttl_ms: int) -> dict[str, Lease]:
        """Extend the leases that a quorum still holds; the others are given up.

        Instances that miss a lock get it again, so that a rolling restart loses none.
        """
        self._check_ttl(ttl_ms)
        owners = _owners(leases)
        sent_at = self._clock.monotonic()
        replies = self._ask(calls(RENEW, self._namespace, owners, str(ttl_ms)), agreed=True)
        ballots = [
            self._without_gaps(voter, reply)
            for voter, reply in zip(self._voters, replies, strict=True)
        ]
        expires_at = lease_end(sent_at, ttl_ms)
        in_time = expires_at > self._clock.monotonic()
        if owners and _answered(ballots) < self.quorum:
            raise self._unavailable(ballots)
        kept, gone, scattered = self._tally(owners, ballots)
        lost = gone + scattered
        if not in_time:
            kept, lost = [], owners
        if lost:
            self._give_up(lost, owners, ballots)
        self._restore(kept, owners, ballots, expires_at)
        return _leases(kept, expires_at)

    def release(self, leases: Collection[Lease]) -> set[str]:
        """Delete our keys on all instances; where one does not answer, with the next call.

        A name whose replies are late may be missing from the answer, though released.
        """
        owners = _owners(leases)
        replies = self._ask(calls(RELEASE, self._namespace, owners), agreed=True)
        for voter, reply in zip(self._voters, replies, strict=True):
            if isinstance(reply, Exception):
                voter.abandon(owners, is_sent=True)
        answers = self._require_quorum(replies)
        return {
            name
            for (name, _token), votes in zip(owners, zip(*answers, strict=True), strict=True)
            if 1 in votes and votes.count(0) < self.quorum
        }

    def inspect(self, names: Collection[str]) -> dict[str, LockInfo]:
        """Return the holders of those names that a quorum holds under one token.

        The TTL is the smallest and the age the largest of theirs.
        """
        wanted = list(names)
        replies = self._ask(calls(INSPECT, self._namespace, [(name, "") for name in wanted]))
        seen: dict[str, list[LockInfo]] = {name: [] for name in wanted}
        for answers in self._require_quorum(replies):
            for name, info in infos(wanted, answers).items():
                seen[name].append(info)
        agreed = {name: self._agreed(views) for name, views in seen.items()}
        return {name: info for name, info in agreed.items() if info is not None}

    def held(self) -> list[LockInfo]:
        """Return the locks of this namespace, from the indexes of all instances."""
        listing = Call(_LIST, 1, [index_key(self._namespace)])
        keys = set(itertools.chain(*self._require_quorum(self._ask([listing]))))
        return list(self.inspect(sorted(lock_name(self._namespace, key) for key in keys)).values())

    def force_release(self, name: str) -> bool:
        """End a lock on all instances that answer; True when any of them had one."""
        replies = self._ask(calls(FORCE_RELEASE, self._namespace, [(name, "")]))
        return any([answers[0] for answers in self._require_quorum(replies)])

    def ping(self) -> float:
        """Return the seconds after which a quorum had shown that it votes and can write."""
        sent_at = self._clock.monotonic()
        self._require_quorum(self._probe(agreed=True))
        return self._clock.monotonic() - sent_at

    def members(self) -> tuple[Member, ...]:
        """Return the state of each instance, in the order of the aliases; never raises.

        Blocks for the socket timeout while an instance hangs.
        """
        return tuple(
            _member(voter.alias, reply)
            for voter, reply in zip(self._voters, self._probe(agreed=False), strict=True)
        )

    def close(self) -> None:
        """Close the connections; the next call opens new ones."""
        self._fanout.close()

    def _check_ttl(self, ttl_ms: int) -> None:
        if checked_ttl(ttl_ms) > self._rejoin_ms:
            raise ValueError(
                f"Lock TTL: got {ttl_ms} ms. Use at most {self._rejoin_ms} ms: a restarted "
                "Redis instance votes again after that time, and must not have forgotten a "
                "lock that is still held."
            )

    def _vote(self, owners: list[Owner], ttl_ms: int) -> tuple[list[_Ballot], float]:
        """Ask all instances that may vote; return their ballots and when they were asked."""
        sent_at = self._clock.monotonic()
        barred = [voter.barred(owners) for voter in self._voters]
        replies = self._ask(
            map(self._guarded, calls(_ACQUIRE, self._namespace, owners, str(ttl_ms), self._note)),
            agreed=True,
            voters_only=True,
        )
        if not any(barred):
            return replies, sent_at
        ballots: list[_Ballot] = [
            [None if owner in bars else vote for owner, vote in zip(owners, reply, strict=True)]
            if bars and isinstance(reply, list)
            else reply
            for reply, bars in zip(replies, barred, strict=True)
        ]
        return ballots, sent_at

    def _tally(
        self, owners: list[Owner], ballots: list[_Ballot]
    ) -> tuple[list[Owner], list[Owner], list[Owner]]:
        """Return what a quorum votes for, what it votes against alike, and the rest."""
        won: list[Owner] = []
        lost: list[Owner] = []
        undecided: list[Owner] = []
        cast = [ballot for ballot in ballots if isinstance(ballot, list)]
        for owner, votes in zip(owners, zip(*cast, strict=True), strict=False):
            if votes.count(1) >= self.quorum:
                won.append(owner)
            elif any(votes.count(vote) >= self.quorum for vote in votes if vote is not None):
                lost.append(owner)
            else:
                undecided.append(owner)
        return won, lost, undecided

    def _give_up(self, missed: list[Owner], owners: list[Owner], ballots: list[_Ballot]) -> None:
        """Remove our keys of ``missed``: now where an instance answers, else with the next call."""
        for voter, ballot in zip(self._voters, ballots, strict=True):
            if isinstance(ballot, _KeptOut) and not ballot.may_hold:
                continue
            refused: set[Owner] = set()
            if isinstance(ballot, list):
                refused = {
                    owner
                    for owner, vote in zip(owners, ballot, strict=True)
                    if vote is not None and vote != 1
                }
            voter.abandon([owner for owner in missed if owner not in refused], is_sent=False)
        self._clean(ballots)

    def _clean(self, ballots: list[_Ballot]) -> None:
        """Release what is abandoned on the instances that answer, or are late at most.

        A late one gets it behind the request that it has yet to answer.
        """
        late: list[Request | None] = []
        there: list[Request | None] = []
        taken = []
        for voter, ballot in zip(self._voters, ballots, strict=True):
            is_late = isinstance(ballot, redis.TimeoutError)
            is_away = isinstance(ballot, _AWAY) and not is_late
            taken.append([] if is_away else voter.take_abandoned())
            request = self._release_of(taken[-1]) if taken[-1] else None
            late.append(request if is_late else None)
            there.append(None if is_late else request)
        if any(late):
            self._fanout.send(late)
        if any(there):
            for voter, owners, reply in zip(
                self._voters, taken, self._fanout.ask(there), strict=True
            ):
                if isinstance(reply, list):
                    voter.confirm(owners)

    def _restore(
        self, kept: list[Owner], owners: list[Owner], ballots: list[_Ballot], expires_at: float
    ) -> None:
        """Put the locks that a quorum holds on the instances that miss them."""
        ttl_ms = int((expires_at - self._clock.monotonic()) * 1000)
        ours = set(kept)
        requests: list[Request | None] = []
        for ballot in ballots:
            answers = ballot if isinstance(ballot, list) else []
            gone = [
                owner
                for owner, vote in zip(owners, answers, strict=False)
                if vote == 0 and owner in ours
            ]
            again = calls(_ACQUIRE, self._namespace, gone, str(ttl_ms), self._note)
            requests.append(Request(list(map(self._guarded, again))) if gone else None)
        if any(requests) and ttl_ms > 0:
            self._fanout.ask(requests)

    def _without_gaps(self, voter: _Voter, reply: _Ballot) -> _Ballot:
        """Return a reply to RENEW; what a kept-out instance misses is no proof of a loss."""
        now = self._clock.monotonic()
        if isinstance(reply, list) and 0 in reply and voter.votes_at > now:
            return _KeptOut(voter.kept_out(now), may_hold=True)
        return reply

    def _ask(
        self, request: Iterable[Call], *, agreed: bool = False, voters_only: bool = False
    ) -> list[_Ballot]:
        """Send one request to all instances, behind the release of what was abandoned there.

        With ``agreed`` slow instances are not waited for once a quorum answers alike; with
        ``voters_only`` kept-out ones are not asked.
        """
        shared = Request(list(request))
        if not shared.count:
            return [[] for _ in self._voters]
        now = self._clock.monotonic()
        requests: list[Request | None] = []
        taken: list[list[Owner]] = []
        for voter in self._voters:
            is_out = voters_only and voter.votes_at > now
            abandoned = voter.take_abandoned() if voter.abandoned and not is_out else []
            taken.append(abandoned)
            mine = (
                Request([*self._release_of(abandoned).calls, *shared.calls])
                if abandoned
                else shared
            )
            requests.append(None if is_out else mine)
        judge = functools.partial(self._judge, shared.count, voters_only)
        replies = self._fanout.ask(requests, judge) if agreed else self._fanout.ask(requests)
        return [
            self._ballot(voter, reply, owners, shared.count, voters_only)
            for voter, reply, owners in zip(self._voters, replies, taken, strict=True)
        ]

    def _ballot(
        self,
        voter: _Voter,
        reply: Reply | None,
        cleaned: list[Owner],
        count: int,
        voters_only: bool,
    ) -> _Ballot:
        if isinstance(reply, list):
            if cleaned:
                voter.confirm(cleaned)
            if voters_only and voter.votes_at > self._clock.monotonic():
                # Found to have restarted while it was asked.
                return _KeptOut(voter.kept_out(self._clock.monotonic()), may_hold=True)
            answers = reply[-count:]
            return answers[0] if count == 1 else list(itertools.chain(*answers))
        if reply is None:
            return _KeptOut(voter.kept_out(self._clock.monotonic()))
        return _KeptOut.read(reply) or reply

    def _judge(self, count: int, voters_only: bool, replies: list[Reply | None]) -> Patience:
        """Wait until a quorum answers alike; not at all for the rest of a clear win."""
        now = self._clock.monotonic()
        answers = [
            reply[-count:]
            for voter, reply in zip(self._voters, replies, strict=True)
            if isinstance(reply, list) and not (voters_only and voter.votes_at > now)
        ]
        if len(answers) < self.quorum or all(
            answers.count(answer) < self.quorum for answer in answers
        ):
            return Patience.TIMEOUT
        return Patience.NONE if voters_only and _all_won(answers) else Patience.GRACE

    def _probe(self, *, agreed: bool) -> list[_Ballot]:
        probe = Call(_PROBE, 1, [probe_key(self._namespace), str(_PROBE_MS)])
        return self._ask([self._guarded(probe)], agreed=agreed, voters_only=True)

    def _guarded(self, call: Call) -> Call:
        keys, arguments = call.values[: call.key_count], call.values[call.key_count :]
        marker = f"{{{self._namespace}:lock}}-born"
        values = [*keys, marker, *arguments, str(self._rejoin_ms)]
        return Call(call.script, call.key_count + 1, values)

    def _release_of(self, owners: list[Owner]) -> Request:
        return Request(list(calls(RELEASE, self._namespace, owners)))

    def _require_quorum(self, ballots: list[_Ballot]) -> list[list[Any]]:
        answers = [ballot for ballot in ballots if isinstance(ballot, list)]
        if len(answers) < self.quorum:
            raise self._unavailable(ballots)
        return answers

    def _unavailable(self, ballots: list[_Ballot]) -> LockUnavailable:
        causes = [
            f"{voter.alias}: {_cause(ballot)}"
            for voter, ballot in zip(self._voters, ballots, strict=True)
            if isinstance(ballot, Exception)
        ]
        text = _("%(count)d of %(all)d instances answered, %(quorum)d are needed; %(causes)s") % {
            "count": _answered(ballots),
            "all": len(ballots),
            "quorum": self.quorum,
            "causes": "; ".join(causes),
        }
        return LockUnavailable(self.name, text)

    def _agreed(self, views: list[LockInfo]) -> LockInfo | None:
        tokens = collections.Counter(info.owner_token for info in views)
        token, count = tokens.most_common(1)[0] if tokens else (None, 0)
        if count < self.quorum:
            return None
        same = [info for info in views if info.owner_token == token]
        oldest = max(same, key=lambda info: info.age_ms or 0)
        left = [info.ttl_ms for info in same if info.ttl_ms is not None]
        return dataclasses.replace(oldest, ttl_ms=min(left, default=None))

    def _pause(self) -> None:
        factor = random.uniform(1 - _JITTER, 1 + _JITTER)  # noqa: S311
        self._clock.wait(threading.Event(), self._retry_delay_ms * factor / 1000)

    def _greet(self, instance: Instance, connection: Any) -> None:
        """Read the uptime on a new connection: there is none from before a restart.

        The scripts are loaded here, since a vote that is not waited for is not sent again.
        """
        commands = [("INFO", "server"), *[("SCRIPT", "LOAD", each.text) for each in _SCRIPTS]]
        connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        found = re.search(r"uptime_in_seconds:(\d+)", _text(connection.read_response()))
        for _script in _SCRIPTS:
            connection.read_response()
        if found is None:
            raise redis.ConnectionError("INFO server does not tell uptime_in_seconds")
        voter = next(voter for voter in self._voters if voter.alias == instance.alias)
        # Both ends of the uptime are cut to whole seconds, so it may be 1 s too long.
        voter.restarted_at = self._clock.monotonic() - max(0, int(found[1]) - 1)
        voter.votes_at = voter.restarted_at + self._rejoin_ms / 1000


class _Voter:
    """What is known of one instance besides its connections."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.restarted_at = -math.inf
        # It does not vote before this monotonic second.
        self.votes_at = -math.inf
        # Tokens to be released here, and whether a release was sent that may yet arrive.
        self.abandoned: dict[Owner, bool] = {}
        self._mutex = threading.Lock()

    def abandon(self, owners: Iterable[Owner], *, is_sent: bool) -> None:
        """Remember tokens that may hold keys here; the oldest are forgotten at the limit."""
        with self._mutex:
            for owner in owners:
                self.abandoned[owner] = self.abandoned.get(owner, False) or is_sent
            while len(self.abandoned) > _ABANDONED_LIMIT:
                del self.abandoned[next(iter(self.abandoned))]

    def take_abandoned(self) -> list[Owner]:
        """Return the tokens to release, which stay until ``confirm()``."""
        with self._mutex:
            self.abandoned = dict.fromkeys(self.abandoned, True)
            return list(self.abandoned)

    def confirm(self, owners: Iterable[Owner]) -> None:
        """Forget tokens that this instance has released."""
        with self._mutex:
            for owner in owners:
                self.abandoned.pop(owner, None)

    def barred(self, owners: Iterable[Owner]) -> set[Owner]:
        """Return the tokens whose release may still arrive here and end a lock just won."""
        if not self.abandoned:
            return set()
        with self._mutex:
            return {owner for owner in owners if self.abandoned.get(owner)}

    def kept_out(self, now: float) -> str:
        """Say since when and for how long it does not vote."""
        return _("restarted %(ago).0f s ago, votes again in %(left).0f s") % {
            "ago": max(0.0, now - self.restarted_at),
            "left": max(0.0, self.votes_at - now),
        }


class _KeptOut(Exception):
    """An instance answers and does not vote; with ``may_hold`` it was asked nevertheless."""

    def __init__(self, cause: str, *, may_hold: bool = False) -> None:
        super().__init__(cause)
        self.may_hold = may_hold

    @classmethod
    def read(cls, error: Exception) -> _KeptOut | None:
        """Return the guard's answer, or None when ``error`` is another one."""
        found = _KEPT_OUT.match(str(error))
        if found is None:
            return None
        ago, left = (int(ms) / 1000 for ms in found.groups())
        text = _("new or emptied %(ago).0f s ago, votes again in %(left).0f s")
        return cls(text % {"ago": ago, "left": left})


def _member(alias: str, reply: _Ballot) -> Member:
    if isinstance(reply, list):
        return Member(alias=alias, state="up")
    state = "kept out" if isinstance(reply, _KeptOut) else "down"
    return Member(alias=alias, state=state, cause=_cause(reply))


def _cause(error: Exception) -> str:
    text = str(error).rstrip(".")
    return text if isinstance(error, _KeptOut) else f"{type(error).__name__}: {text}"


def _answered(ballots: list[_Ballot]) -> int:
    return sum(isinstance(ballot, list) for ballot in ballots)


def _all_won(answers: list[list[Any]]) -> bool:
    return all(vote == 1 for answer in answers for votes in answer for vote in votes)


def _owners(leases: Iterable[Lease]) -> list[Owner]:
    return [(lease.name, lease.owner_token) for lease in leases]


def _leases(owners: Iterable[Owner], expires_at: float) -> dict[str, Lease]:
    return {
        name: Lease(name=name, owner_token=token, expires_at=expires_at) for name, token in owners
    }


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value
