"""Measure how long the next instant takes, beside croniter and cronsim in the same run.

    python -m benchmarks.timetable [--starts 2000] [--schedules 100000] [--seed 1]

Prints one JSON line. All times are CPU time of this thread.

- ``us_per_next``: one ``next`` in America/New_York from random starts of one year, mean over
  11 rules. Ours is warm, the rule parsed and the zone read, but no instant is remembered;
  croniter keeps its parsed object and iterates; cronsim parses and searches.
- ``schedules``: the next instant of many schedules from one instant: the first time in this
  process, again, and again with instants remembered.

cronsim is an optional package of the ``dev`` extra; without it its numbers are null.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

from croniter import croniter

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")

from distcron_app import timetable
from distcron_app.timetable import Cron, kinds

ZONE = "America/New_York"
NOW = datetime(2026, 11, 29, 10, 17, tzinfo=UTC)
RULES = [
    "* * * * *",
    "*/5 * * * *",
    "0 0 * * *",
    "30 2 * * *",
    "0 9 * * 1-5",
    "30 4 1,15 * 5",
    "0 0 29 2 *",
    "0 0 * * 1#5",
    "0 0 L * *",
    "15,45 3-7/2,22 */3 * *",
    "0 */6 * * *",
]
POPULAR = [
    *["* * * * *", "*/5 * * * *", "*/10 * * * *", "*/15 * * * *", "*/30 * * * *", "0 * * * *"],
    *["0 */2 * * *", "0 */4 * * *", "0 */6 * * *", "0 */12 * * *", "0 0 * * *", "0 1 * * *"],
    *["0 2 * * *", "0 3 * * *", "0 6 * * *", "0 9 * * 1-5", "0 0 * * 0", "0 0 * * 1"],
    *["0 0 1 * *", "0 0 1 1 *", "0 9 * * 1", "0 8-18 * * 1-5", "*/5 9-17 * * 1-5"],
]
OTHER_ZONES = [
    *["Asia/Makassar", "Asia/Jayapura", "Asia/Singapore", "Asia/Tokyo", "Australia/Sydney"],
    *["Europe/London", "Europe/Berlin", "America/New_York"],
]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Measure how long the next instant takes.")
    parser.add_argument("--starts", type=int, default=2000, help="random starts of each rule")
    parser.add_argument("--schedules", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    pick = random.Random(options.seed)
    starts = [NOW + timedelta(seconds=pick.randrange(365 * 86_400)) for _ in range(options.starts)]
    many = measure_schedules(list(mixed(pick, options.schedules)))
    print(json.dumps({"benchmark": "timetable", **side_by_side(starts), "schedules": many}))


def side_by_side(starts: Sequence[datetime]) -> dict[str, Any]:
    """Return microseconds per next of each library, and how many times ours they are."""
    local = [start.astimezone(ZoneInfo(ZONE)) for start in starts]
    some = local[: max(1, len(local) // 10)]  # croniter is slow
    found: dict[str, float | None] = {
        "distcron": mean_us(ours, starts),
        "croniter": mean_us(croniters, some),
        "cronsim": mean_us(cronsims, some) if has_cronsim() else None,
    }
    own = found["distcron"]
    assert own is not None
    return {
        "python": platform.python_version(),
        "tzdata": timetable.tzdata_version(),
        "us_per_next": {name: us and round(us, 2) for name, us in found.items()},
        "times_ours": {
            name: us and round(us / own, 1) for name, us in found.items() if name != "distcron"
        },
        "cronsim_missing": found["cronsim"] is None,
    }


def mean_us(
    prepare: Callable[[str], Callable[[datetime], object]], starts: Sequence[datetime]
) -> float:
    """Return the mean microseconds of one next, the best of three passes for each rule."""
    total = 0.0
    for rule in RULES:
        following = prepare(rule)
        following(starts[0])
        total += min(spent(following, starts) for _ in range(3)) / len(starts)
    return total / len(RULES) * 1e6


def spent(following: Callable[[datetime], object], starts: Sequence[datetime]) -> float:
    """Return the CPU seconds of calling for all starts."""
    kinds.forget_instants()
    began = time.thread_time()
    for start in starts:
        following(start)
    return time.thread_time() - began


def ours(rule: str) -> Callable[[datetime], object]:
    """Return our next without the memo of instants, but with the cost of keeping it."""
    return Cron(expression=rule, timezone=ZONE).next_after


def croniters(rule: str) -> Callable[[datetime], object]:
    """Return croniter's next from an object that is parsed once."""
    parsed = croniter(rule, NOW)
    return lambda start: parsed.get_next(datetime, start_time=start)


def cronsims(rule: str) -> Callable[[datetime], object]:
    """Return cronsim's parse and next: its objects are bound to their start."""
    from cronsim import CronSim

    return lambda start: next(CronSim(rule, start))


def has_cronsim() -> bool:
    """Return whether the optional package is installed."""
    try:
        import cronsim  # noqa: F401
    except ImportError:
        return False
    return True


def mixed(pick: random.Random, number: int) -> Iterator[Cron]:
    """Yield schedules: half popular rules, 40 % random daily or weekly, 10 % hourly."""
    for _ in range(number):
        share, minute = pick.random(), pick.randrange(60)
        if share < 0.5:
            rule = pick.choice(POPULAR)
        elif share < 0.9:
            weekday = pick.choice(["*", "*", str(pick.randrange(7))])
            rule = f"{minute} {pick.randrange(24)} * * {weekday}"
        else:
            rule = f"{minute} * * * *"
        yield Cron(expression=rule, timezone=random_zone(pick))


def random_zone(pick: random.Random) -> str:
    """Return a zone: 60 parts Jakarta, 15 UTC, 24 others."""
    share = pick.randrange(99)
    if share < 60:
        return "Asia/Jakarta"
    return "UTC" if share < 75 else pick.choice(OTHER_ZONES)


def measure_schedules(schedules: Sequence[Cron]) -> dict[str, Any]:
    """Return the seconds that the next instant of all schedules takes."""

    def all_next(at: datetime) -> float:
        began = time.thread_time()
        for schedule in schedules:
            schedule.next_after(at)
        return time.thread_time() - began

    cold = all_next(NOW)
    warm = min(all_next(NOW + timedelta(minutes=later)) for later in range(1, 4))
    return {
        "number": len(schedules),
        "distinct": len({(one.expression, one.timezone) for one in schedules}),
        "first_seconds": round(cold, 3),
        "again_seconds": round(warm, 3),
        "remembered_seconds": round(all_next(NOW + timedelta(minutes=3)), 3),
    }


if __name__ == "__main__":
    main()
