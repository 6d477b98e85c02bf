"""From wall minutes to instants: a rule walked through the clock changes of a zone.

Works on whole UTC and wall seconds since 1970. Between two changes, in one *stretch*, a
zone has one offset; each stretch has a part of the wall clock in which the rule runs, and
a gap may add one instant at its end. Next, previous, count and the masks of the forecast
all follow from these parts, so they cannot disagree. The rule itself is in ``timetable``.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from distcron_app.timetable.walk import DAY_MINUTES, Policy, WallRule
from distcron_app.timetable.zones import FIRST_SECOND, LAST_SECOND, Changes, changes_around

__all__ = [
    "count_seconds",
    "masks",
    "moved_wall",
    "next_second",
    "previous_second",
    "reached",
    "repeated_wall",
    "seconds_of_wall",
]

_THREE_HOURS = 3 * 3600  # where Debian's cron stops taking a jump for a clock change
_DAY = 86_400


def next_second(rule: WallRule, timezone: str, after: int) -> int | None:
    """Return the first UTC second > ``after`` at which the rule runs."""
    after = max(after, FIRST_SECOND)
    second = after
    while second < LAST_SECOND:
        known = changes_around(timezone, after, second)
        found = _walk(rule, known, after)
        if found is None or found < known.until:
            return found
        second = found  # beyond the table: walk again with one that reaches it
    return None


def previous_second(rule: WallRule, timezone: str, before: int) -> int | None:
    """Return the last UTC second < ``before`` at which the rule runs."""
    before = min(before, LAST_SECOND)
    second = before
    while second > FIRST_SECOND:
        known = changes_around(timezone, second, before)
        found = _walk_back(rule, known, before)
        if found is None or found >= known.since:
            return found
        second = found
    return None


def count_seconds(rule: WallRule, timezone: str, start: int, end: int) -> int:
    """Return how many UTC seconds with start < second <= end run the rule."""
    start, end = max(start, FIRST_SECOND), min(end, LAST_SECOND)
    if end <= start:
        return 0
    known = changes_around(timezone, start, end)
    total = 0
    for index in range(bisect_right(known.at, start), bisect_right(known.at, end) + 1):
        low, high = _clipped(rule.policy, known, index, start + 1, end + 1)
        total += rule.count_walls(low, high - 1)
        if index and start < known.at[index - 1]:
            total += _adds_one(rule, known, index - 1)
    return total


def masks(rule: WallRule, timezone: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (UTC second, bits): the rule runs 60 s times the number of each bit later.

    Together they hold each instant with start < instant <= end once; costs days.
    """
    start, end = max(start, FIRST_SECOND), min(end, LAST_SECOND)
    known = changes_around(timezone, start, max(start, end))
    for index in range(bisect_right(known.at, start), bisect_right(known.at, end) + 1):
        low, high = _clipped(rule.policy, known, index, start + 1, end + 1)
        for day in range(low // DAY_MINUTES, -(-high // DAY_MINUTES)):
            first = max(low - day * DAY_MINUTES, 0)
            bits = rule.day_times(day) & ((1 << max(high - day * DAY_MINUTES, 0)) - 1)
            if bits := bits >> first:
                yield (day * DAY_MINUTES + first) * 60 - known.offsets[index], bits
        if index and start < known.at[index - 1] and _adds_one(rule, known, index - 1):
            yield known.at[index - 1], 1


def moved_wall(rule: WallRule, timezone: str, second: int) -> int | None:
    """Return the wall second inside a gap that ``rule`` makes up for at ``second``, or None."""
    known = changes_around(timezone, second, second)
    index = bisect_left(known.at, second)
    if index == len(known.at) or known.at[index] != second or not _makes_up(rule, known, index):
        return None
    skipped = rule.next_wall(_minute_from(known.ends[index]))
    return None if skipped is None else skipped * 60


def repeated_wall(rule: WallRule, timezone: str, second: int) -> int | None:
    """Return the wall second of ``second`` if a fold has it twice and ``rule`` runs once."""
    policy = rule.policy
    if policy.first_pass and policy.second_pass:
        return None
    known = changes_around(timezone, second, second)
    index = bisect_right(known.at, second)
    wall = second + known.offsets[index]
    if policy.second_pass:
        held = index and _is_fold(known, index - 1) and wall < known.ends[index - 1]
    else:
        held = index < len(known.at) and _is_fold(known, index) and wall >= known.starts[index]
    return wall if held else None


def seconds_of_wall(timezone: str, wall: int, policy: Policy) -> list[int]:
    """Return the UTC seconds at which a zone's clock shows the wall second ``wall``.

    None inside a gap, unless ``policy`` shifts: then the end of the gap.
    """
    known = changes_around(timezone, wall - _DAY, wall + _DAY)
    found = []
    for index, offset in enumerate(known.offsets):
        begins = known.at[index - 1] if index else known.since
        stops = known.at[index] if index < len(known.at) else known.until
        if begins <= wall - offset < stops and _runs(policy, known, index, wall):
            found.append(wall - offset)
        if policy.shifts and index and _is_inside_gap(known, index - 1, wall):
            found.append(known.at[index - 1])
    return found


def reached(timezone: str, wall: int) -> tuple[int, int]:
    """Return the first and last UTC second at which a zone's clock comes to ``wall``.

    If a jump passes it over, that is the second after the jump.
    """
    known = changes_around(timezone, wall - 2 * _DAY, wall + 2 * _DAY)
    found = []
    for index, offset in enumerate(known.offsets):
        begins = known.at[index - 1] if index else known.since
        stops = known.at[index] if index < len(known.at) else known.until
        if begins <= wall - offset < stops:
            found.append(wall - offset)
        elif index and known.ends[index - 1] <= wall < known.starts[index - 1]:
            found.append(begins)
    return found[0], found[-1]


def _walk(rule: WallRule, known: Changes, after: int) -> int | None:
    policy = rule.policy
    index = bisect_right(known.at, after)
    bound = after + known.offsets[index] + 1
    if not policy.second_pass:
        bound = max(bound, _low(policy, known, index))
    wall = rule.next_wall(-(-bound // 60))
    while wall is not None and index < len(known.at):
        if wall * 60 < known.edges[index] or wall * 60 < _high(policy, known, index):
            break
        if policy.shifts and _is_inside_gap(known, index, wall * 60):
            return known.at[index]
        index += 1
        low = _low(policy, known, index)
        if not bound <= low <= wall * 60:  # else no other wall minute of the rule is between
            bound, wall = low, rule.next_wall(_minute_from(low))
    return None if wall is None else wall * 60 - known.offsets[index]


def _walk_back(rule: WallRule, known: Changes, before: int) -> int | None:
    policy = rule.policy
    index = bisect_left(known.at, before)
    last = before - 1 + known.offsets[index]
    while True:
        wall = rule.previous_wall(min(last, _high(policy, known, index) - 1) // 60)
        if index == 0 or (wall is not None and wall * 60 >= _low(policy, known, index)):
            return None if wall is None else wall * 60 - known.offsets[index]
        index -= 1
        if _makes_up(rule, known, index):
            return known.at[index]
        last = known.ends[index] - 1


def _low(policy: Policy, known: Changes, index: int) -> int:
    """Return the first wall second of stretch ``index`` in which the rule runs."""
    if index == 0:
        return FIRST_SECOND - _DAY
    start, end = known.starts[index - 1], known.ends[index - 1]
    if policy.second_pass or not 0 < end - start <= _THREE_HOURS:
        return start
    return end  # the first pass has run up to there


def _high(policy: Policy, known: Changes, index: int) -> int:
    """Return the wall second at which the rule stops running in stretch ``index``."""
    if index == len(known.at):
        return LAST_SECOND + _DAY
    start, end = known.starts[index], known.ends[index]
    if policy.first_pass or not 0 < end - start <= _THREE_HOURS:
        return end
    return start  # the second pass is still to come


def _runs(policy: Policy, known: Changes, index: int, wall: int) -> bool:
    return _low(policy, known, index) <= wall < _high(policy, known, index)


def _clipped(policy: Policy, known: Changes, index: int, first: int, stop: int) -> tuple[int, int]:
    """Return the wall minutes of a stretch within first..stop, UTC seconds, stop excluded."""
    offset = known.offsets[index]
    low = max(first + offset, _low(policy, known, index))
    high = min(stop + offset, _high(policy, known, index))
    return _minute_from(low), _minute_from(high)


def _makes_up(rule: WallRule, known: Changes, index: int) -> bool:
    """Return whether the rule names a minute inside change ``index``, a gap, and shifts it."""
    if not rule.policy.shifts or not _is_gap(known, index):
        return False
    skipped = rule.next_wall(_minute_from(known.ends[index]))
    return skipped is not None and skipped * 60 < known.starts[index]


def _adds_one(rule: WallRule, known: Changes, index: int) -> bool:
    """Return whether the end of change ``index``, a gap, is an instant only to make up."""
    start = known.starts[index]
    is_real = start % 60 == 0 and rule.next_wall(start // 60) == start // 60
    return not is_real and _makes_up(rule, known, index)


def _is_inside_gap(known: Changes, index: int, wall: int) -> bool:
    return known.ends[index] <= wall < known.starts[index] and _is_gap(known, index)


def _is_gap(known: Changes, index: int) -> bool:
    return 0 < known.starts[index] - known.ends[index] < _THREE_HOURS


def _is_fold(known: Changes, index: int) -> bool:
    return 0 < known.ends[index] - known.starts[index] <= _THREE_HOURS


def _minute_from(wall: int) -> int:
    """Return the first whole minute at or after the wall second."""
    return -(-wall // 60)
