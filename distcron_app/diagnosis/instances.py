"""What one Redis told about itself, judged. No input or output here."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from django.utils import formats
from django.utils.translation import gettext as _

from distcron_app.diagnosis.finding import OK, PROBLEM, WARNING, Finding

__all__ = [
    "INSTANCE_JUDGEMENTS",
    "Instance",
    "judge_clock",
    "judge_latency",
    "judge_quorum",
    "judge_stuck",
]

LATENCY_LIMIT_MS = 2.0
CLOCK_LIMIT_SECONDS = 1.0
_NEARLY_FULL = 0.9
_REPLICA_LAG_SECONDS = 10
# The client library speaks the protocol of 6.0, and the scripts need nothing newer.
_OLDEST_WORKING = (6, 0)
# Older lines get no security fixes any more.
_OLDEST_MAINTAINED = (6, 2)
_LOOPBACK = re.compile(r"-?(127\.[\d.]+|::1|localhost)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """One server. ``info`` and ``config`` are None where it refused to tell.

    ``has_password`` says whether a client without credentials is refused, None where
    that could not be found out.
    """

    subject: str
    address: str = ""
    is_local: bool = True
    is_encrypted: bool = False
    has_password: bool | None = None
    info: Mapping[str, Any] | None = None
    config: Mapping[str, str] | None = None

    @property
    def run_id(self) -> str:
        """Return the id that the server drew at its start, "" where it did not tell."""
        return self.text("run_id")

    def number(self, key: str) -> int:
        """Return a number of INFO, 0 where it is missing."""
        return int((self.info or {}).get(key) or 0)

    def text(self, key: str) -> str:
        """Return a text of INFO, "" where it is missing."""
        return str((self.info or {}).get(key, ""))

    def setting(self, key: str) -> str | None:
        """Return a value of CONFIG, or None where it is not known."""
        return None if self.config is None else self.config.get(key)


def judge_readable(seen: Instance) -> list[Finding]:
    """Say what could not be looked at."""
    refused = [
        command
        for command, answer in (("INFO", seen.info), ("CONFIG GET", seen.config))
        if answer is None
    ]
    if not refused:
        return []
    return [
        Finding(
            code="redis.readable",
            level=WARNING,
            subject=seen.subject,
            text=_("%s is refused, so part of this server could not be looked at")
            % " / ".join(refused),
            consequence=_("Eviction, persistence and replicas are unknown: ask who runs it."),
            fix=_("Allow the user of this alias +info and +config|get, or check them by hand."),
        )
    ]


def judge_version(seen: Instance) -> list[Finding]:
    """Say which server it is, and whether locks work with it."""
    if seen.info is None:
        return []
    name = _("Valkey") if seen.text("valkey_version") else _("Redis")
    version = seen.text("valkey_version") or seen.text("redis_version")
    facts = {"name": name, "version": version, "address": seen.address}
    text = _("%(name)s %(version)s at %(address)s") % facts
    # Valkey tells the version of Redis that it is compatible with.
    compatible = tuple(int(part) for part in re.findall(r"\d+", seen.text("redis_version"))[:2])
    if compatible >= _OLDEST_MAINTAINED:
        return [Finding(code="redis.version", level=OK, subject=seen.subject, text=text)]
    works = compatible >= _OLDEST_WORKING
    return [
        Finding(
            code="redis.version",
            level=WARNING if works else PROBLEM,
            subject=seen.subject,
            text=text,
            consequence=_("This version gets no security fixes any more.")
            if works
            else _("Locks need Redis 6.0 or later: they fail, or fail to be seen."),
            fix=_("Update to Redis 6.2 or later, or to Valkey."),
        )
    ]


def judge_role(seen: Instance) -> list[Finding]:
    """Refuse a replica: locks must be written to the primary."""
    role = seen.text("role")
    if not role:
        return []
    if role == "master":
        return [
            Finding(code="redis.role", level=OK, subject=seen.subject, text=_("it is a primary"))
        ]
    facts = {"host": seen.text("master_host"), "port": seen.text("master_port")}
    return [
        Finding(
            code="redis.role",
            level=PROBLEM,
            subject=seen.subject,
            text=_("it is a replica of %(host)s:%(port)s") % facts,
            consequence=_("Every lock is refused: a replica takes no writes."),
            fix=_("Let LOCATION name the primary, or use Redis Sentinel to follow it."),
        )
    ]


def judge_eviction(seen: Instance) -> list[Finding]:
    """Refuse a server that throws locks away when its memory is full."""
    if seen.info is None:
        return []
    limit, policy = seen.number("maxmemory"), seen.text("maxmemory_policy")
    if not limit:
        text = _("maxmemory is not set, so nothing is evicted")
        return [Finding(code="redis.eviction", level=OK, subject=seen.subject, text=text)]
    text = _("maxmemory-policy is %s") % policy
    if policy == "noeviction":
        return [Finding(code="redis.eviction", level=OK, subject=seen.subject, text=text)]
    return [
        Finding(
            code="redis.eviction",
            level=PROBLEM,
            subject=seen.subject,
            text=text,
            consequence=_("With its memory full, Redis drops locks that are held."),
            fix=_("Set maxmemory-policy noeviction, in the file and by CONFIG SET."),
        )
    ]


def judge_memory(seen: Instance) -> list[Finding]:
    """Warn before the memory is full."""
    limit, used = seen.number("maxmemory"), seen.number("used_memory")
    if not limit:
        return []
    share = used / limit
    text = _("%(percent)d %% of maxmemory is used") % {"percent": math.floor(share * 100)}
    if share < _NEARLY_FULL:
        return [Finding(code="redis.memory", level=OK, subject=seen.subject, text=text)]
    return [
        Finding(
            code="redis.memory",
            level=WARNING,
            subject=seen.subject,
            text=text,
            consequence=_("When it is full, Redis refuses new locks."),
            fix=_("Raise maxmemory, or move the locks away from what fills it."),
        )
    ]


def judge_persistence(seen: Instance) -> list[Finding]:
    """Warn where a restart forgets the locks that are held."""
    if seen.info is None:
        return []
    saves = seen.setting("save")
    if seen.number("aof_enabled"):
        text = _("persistence: append-only file")
        return [Finding(code="redis.persistence", level=OK, subject=seen.subject, text=text)]
    text = _("no append-only file, snapshots only") if saves else _("nothing is saved to disk")
    if saves is None:
        text = _("no append-only file; whether snapshots are saved is not known")
    return [
        Finding(
            code="redis.persistence",
            level=WARNING,
            subject=seen.subject,
            text=text,
            consequence=_(
                "A restart forgets locks that are held. The database still lets each "
                "occurrence run once; locks of your own code have no second guard."
            ),
            fix=_("Set appendonly yes and appendfsync everysec."),
        )
    ]


def judge_saving(seen: Instance) -> list[Finding]:
    """Find a server that cannot write to its disk, and so refuses or soon loses locks."""
    failed = [
        key
        for key in ("rdb_last_bgsave_status", "aof_last_write_status", "aof_last_bgrewrite_status")
        if seen.text(key) not in ("", "ok")
    ]
    if not failed:
        return []
    goes_on = seen.setting("stop-writes-on-bgsave-error") == "no"
    refuses = "aof_last_write_status" in failed or not goes_on
    return [
        Finding(
            code="redis.saving",
            level=PROBLEM if refuses else WARNING,
            subject=seen.subject,
            text=_("the last save to disk failed: %s") % ", ".join(failed),
            consequence=_("Redis refuses every lock with MISCONF until a save succeeds.")
            if refuses
            else _("A restart forgets locks that are held."),
            fix=_("Free disk space or mend the rights of its folder; its log names the error."),
        )
    ]


def judge_replicas(seen: Instance) -> list[Finding]:
    """Warn where a failover may lose the newest locks without anybody being told."""
    count = seen.number("connected_slaves")
    if not count or seen.text("role") != "master":
        return []
    facts = {"count": count, "least": seen.setting("min-replicas-to-write") or "0"}
    text = _("replicas: %(count)d, min-replicas-to-write %(least)s") % facts
    behind = [key for key in map("slave{}".format, range(count)) if _is_behind(seen, key)]
    if behind:
        text += ", " + _("behind: %d") % len(behind)
    if facts["least"] != "0" and not behind:
        return [Finding(code="redis.replicas", level=OK, subject=seen.subject, text=text)]
    return [
        Finding(
            code="redis.replicas",
            level=WARNING,
            subject=seen.subject,
            text=text,
            consequence=_(
                "A failover may lose the newest locks: a primary that is cut off goes on "
                "granting locks which its replicas never see."
            ),
            fix=_("Set min-replicas-to-write 1 and min-replicas-max-lag 10; mend slow replicas."),
        )
    ]


def judge_access(seen: Instance) -> list[Finding]:
    """Refuse a server that whoever reaches it may write to."""
    if seen.has_password is None:
        return []
    if seen.has_password:
        text = _("clients without a password are refused")
        return [Finding(code="redis.access", level=OK, subject=seen.subject, text=text)]
    if seen.is_local and not _listens_widely(seen):
        text = _("no password, and reached from this machine alone")
        return [Finding(code="redis.access", level=OK, subject=seen.subject, text=text)]
    return [
        Finding(
            code="redis.access",
            level=PROBLEM,
            subject=seen.subject,
            text=_("no password, and reached over the network at %s") % seen.address
            if not seen.is_local
            else _("no password, protected-mode off, and it listens on %s") % seen.setting("bind"),
            consequence=_("Whoever reaches the port can take, free and forge every lock."),
            fix=_("Set a password or ACL users, and a firewall; docs/doctor.md has an ACL."),
        )
    ]


def judge_encryption(seen: Instance) -> list[Finding]:
    """Warn where passwords and locks cross a network in the clear."""
    if seen.is_local:
        return []
    if seen.is_encrypted:
        text = _("the link is encrypted")
        return [Finding(code="redis.encryption", level=OK, subject=seen.subject, text=text)]
    return [
        Finding(
            code="redis.encryption",
            level=WARNING,
            subject=seen.subject,
            text=_("the link to %s is not encrypted") % seen.address,
            consequence=_("Who can listen on the network reads the password and owns the locks."),
            fix=_("Use rediss:// in LOCATION, or a private network."),
        )
    ]


def judge_clients(seen: Instance) -> list[Finding]:
    """Warn before the connections of the server are used up."""
    limit, used = seen.number("maxclients"), seen.number("connected_clients")
    if not limit or used < limit * _NEARLY_FULL:
        return []
    return [
        Finding(
            code="redis.clients",
            level=WARNING,
            subject=seen.subject,
            text=_("%(used)d of %(limit)d connections are used") % {"used": used, "limit": limit},
            consequence=_("A node that cannot connect works without locks."),
            fix=_("Raise maxclients, or lower max_connections of the cache aliases."),
        )
    ]


INSTANCE_JUDGEMENTS: tuple[Callable[[Instance], list[Finding]], ...] = (
    judge_version,
    judge_readable,
    judge_role,
    judge_eviction,
    judge_memory,
    judge_persistence,
    judge_saving,
    judge_replicas,
    judge_access,
    judge_encryption,
    judge_clients,
)


def judge_latency(subject: str, measured_ms: Sequence[float]) -> Finding:
    """Warn where one answer in a hundred takes longer than 2 ms."""
    ordered = sorted(measured_ms)
    p50, p99 = (ordered[math.ceil(len(ordered) * part) - 1] for part in (0.5, 0.99))
    facts = {
        "p50": formats.number_format(p50, 2),
        "p99": formats.number_format(p99, 2),
        "count": len(ordered),
    }
    text = _("answers in %(p50)s ms, 99 %% within %(p99)s ms (pings: %(count)d)") % facts
    if p99 <= LATENCY_LIMIT_MS:
        return Finding(code="redis.latency", level=OK, subject=subject, text=text)
    return Finding(
        code="redis.latency",
        level=WARNING,
        subject=subject,
        text=text,
        consequence=_("Each tick waits for an answer, so runs start that much later."),
        fix=_("Look for slow commands, swapping and saves (redis-cli --latency), or move it near."),
    )


def judge_clock(subject: str, offset_seconds: float) -> Finding:
    """Warn where the clocks of this Redis and of the database differ."""
    text = _("its clock is %+d ms from the database's") % round(offset_seconds * 1000)
    if abs(offset_seconds) <= CLOCK_LIMIT_SECONDS:
        return Finding(code="redis.clock", level=OK, subject=subject, text=text)
    return Finding(
        code="redis.clock",
        level=WARNING,
        subject=subject,
        text=text,
        consequence=_(
            "Locks last by this clock. A step of it ends locks early or keeps them too long; "
            "the database still decides what runs."
        ),
        fix=_("Let NTP run on that host, slewing and not stepping."),
    )


def judge_stuck(subject: str, names: Sequence[str]) -> Finding:
    """Warn about locks that nothing ends."""
    if not names:
        text = _("every lock has an end")
        return Finding(code="redis.stuck", level=OK, subject=subject, text=text)
    return Finding(
        code="redis.stuck",
        level=WARNING,
        subject=subject,
        text=_("locks without a TTL: %(count)d (%(names)s)")
        % {"count": len(names), "names": ", ".join(names[:3])},
        consequence=_("A schedule behind one is late each time; your own code waits for ever."),
        fix=_("Release them: schedulerctl locks release NAME --reason TEXT"),
    )


def judge_quorum(instances: Mapping[str, Instance | None], ttl_seconds: float) -> list[Finding]:
    """Judge the instances of a quorum together; None where one does not answer."""
    answering = {alias: seen for alias, seen in instances.items() if seen is not None}
    return [
        _answering(len(answering), len(instances)),
        *_independent(answering),
        *_restarted(answering, ttl_seconds),
    ]


def _answering(count: int, total: int) -> Finding:
    text = _("%(count)d of %(total)d instances answer") % {"count": count, "total": total}
    if count == total:
        return Finding(code="quorum.instances", level=OK, text=text)
    is_lost = count <= total // 2
    return Finding(
        code="quorum.instances",
        level=PROBLEM if is_lost else WARNING,
        text=text,
        consequence=_("There is no majority: schedules of the level 'quorum' wait.")
        if is_lost
        else _("Locks work. How many more may fail: %d.") % (count - total // 2 - 1),
        fix=_("Bring back the instances that do not answer."),
        is_outage=is_lost,
    )


def _independent(answering: Mapping[str, Instance]) -> list[Finding]:
    by_run_id: dict[str, list[str]] = {}
    for alias, seen in answering.items():
        if seen.run_id:
            by_run_id.setdefault(seen.run_id, []).append(alias)
    shared = sorted(", ".join(aliases) for aliases in by_run_id.values() if len(aliases) > 1)
    if not shared:
        text = _("no two aliases are one server")
        return [Finding(code="quorum.independent", level=OK, text=text)] if by_run_id else []
    return [
        Finding(
            code="quorum.independent",
            level=PROBLEM,
            text=_("aliases on one and the same server: %s") % "; ".join(shared),
            consequence=_("One failure takes several votes, so a majority may be lost or forged."),
            fix=_("Give each alias of QUORUM_ALIASES a server of its own, without replication."),
        )
    ]


def _restarted(answering: Mapping[str, Instance], ttl_seconds: float) -> list[Finding]:
    young = [
        alias
        for alias, seen in answering.items()
        if seen.info is not None and seen.number("uptime_in_seconds") <= ttl_seconds
    ]
    if not young:
        return []
    return [
        Finding(
            code="quorum.restarted",
            level=WARNING,
            text=_("restarted within the last TTL: %s") % ", ".join(young),
            consequence=_("It may have forgotten locks, so it has no vote for one TTL."),
            fix=_("Nothing, if you restarted it; else look into its log."),
        )
    ]


def _is_behind(seen: Instance, key: str) -> bool:
    replica = (seen.info or {}).get(key)
    if not isinstance(replica, Mapping):
        return False
    lag = int(replica.get("lag") or 0)
    return replica.get("state") != "online" or lag > _REPLICA_LAG_SECONDS


def _listens_widely(seen: Instance) -> bool:
    addresses = (seen.setting("bind") or "").split()
    is_open = seen.setting("protected-mode") == "no"
    return is_open and not all(_LOOPBACK.fullmatch(address) for address in addresses)
