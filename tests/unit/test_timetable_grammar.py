"""What cron text is accepted, its canonical form, and each refusal with its fix."""

import random
import re
import string
import threading
import time
from datetime import UTC, datetime

import pytest

from distcron_app import timetable
from distcron_app.errors import TimetableError
from distcron_app.timetable import canonical, fields


def refusal(expression: str) -> TimetableError:
    with pytest.raises(TimetableError) as caught:
        timetable.build(kind="cron", cron=expression)
    assert caught.value.field == "cron"
    return caught.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0 9 * * 1-5", "0 9 * * 1-5"),
        ("  00\t09  *  jAn   mOn ", "0 9 * jan mon"),
        ("@hourly", "0 * * * *"),
        ("@daily", "0 0 * * *"),
        ("@midnight", "0 0 * * *"),
        ("@weekly", "0 0 * * 0"),
        ("@monthly", "0 0 1 * *"),
        ("@yearly", "0 0 1 1 *"),
        (" @Annually ", "0 0 1 1 *"),
        ("*/5 1-9/02 L * *", "*/5 1-9/2 l * *"),
        ("0 0 * * SUN#5,L5", "0 0 * * sun#5,l5"),
        ("0 0 1,L * *", "0 0 1,l * *"),
        ("0 0 * * sat-sun", "0 0 * * sat-sun"),
        ("*/59 */23 */31 */12 */7", "*/59 */23 */31 */12 */7"),
    ],
)
def test_canonical_text(text: str, expected: str) -> None:
    assert canonical(text) == expected
    assert canonical(expected) == expected


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("", "Cron rule: empty. Write five fields: minute hour day month weekday."),
        (
            "* * * *",
            "Cron rule: five fields expected, got 4. Is the weekday missing? "
            "Write minute hour day month weekday, and * for any.",
        ),
        (
            "0 0 2 * * 0",
            "Cron rule: five fields expected, got 6: minute hour day month weekday. "
            "Seconds are not part of the rule; choose an interval (every N seconds) instead.",
        ),
        (
            "@reboot",
            "Cron rule '@reboot': names no time. Write five fields, or choose 'once'.",
        ),
        (
            "@every 5m",
            "Cron rule '@every': not supported. Choose an interval: every 300 seconds.",
        ),
        (
            "@every 1h30m10s",
            "Cron rule '@every': not supported. Choose an interval: every 5410 seconds.",
        ),
        (
            "@every fortnight",
            "Cron rule '@every': not supported. Choose an interval: every N seconds.",
        ),
        (
            "* * *",
            "Cron rule: five fields expected, got 3. "
            "Write minute hour day month weekday, and * for any.",
        ),
        (
            "@fortnightly",
            "Cron rule '@fortnightly': not known. Use @hourly, @daily, @midnight, @weekly, "
            "@monthly, @yearly, @annually, or five fields.",
        ),
        ("1-1 * * * *", "Minute '1-1': both ends are equal. Write 1."),
        ("0 0 * * mon-mon", "Weekday 'mon-mon': both ends are equal. Write mon."),
        ("0 0 * * sun-sun", "Weekday 'sun-sun': both ends are equal. Write sun."),
        ("0 22-2 * * *", "Hour '22-2': runs backwards. Write 22-23,0-2."),
        ("0 0 * * fri-mon", "Weekday 'fri-mon': runs backwards. Write 5-6,0-1."),
        ("0 0 * * 7-2", "Weekday '7-2': runs backwards. Write 0-2."),
        ("0 0 * * 6-0", "Weekday '6-0': runs backwards. Write 6,0."),
        ("0 22-4/3 * * *", "Hour '22-4/3': runs backwards. Write 22,1,4."),
        ("0 0 * nov-feb *", "Month 'nov-feb': runs backwards. Write 11-12,1-2."),
        ("5/15 * * * *", "Minute '5/15': read differently by cron programs. Write 5-59/15."),
        ("59/15 * * * *", "Minute '59/15': read differently by cron programs. Write 59."),
        ("0 0 * * 1/2", "Weekday '1/2': read differently by cron programs. Write 1-6/2."),
        ("*/100 * * * *", "Minute '*/100': step larger than the range. Use at most 59."),
        ("3-4/5 * * * *", "Minute '3-4/5': step larger than the range. Use at most 1."),
        ("*/0 * * * *", "Minute '*/0': the step must be 1 or more."),
        (
            "0,R * * * *",
            "Minute 'r': not supported, since nodes could compute different times. "
            "Write a fixed number.",
        ),
        ("0 0 ? * 1", "Day '?': not supported. Write * for any."),
        (
            "0 0 15W * *",
            "Day '15w': nearest weekdays are not supported. "
            "Write a day, or L for the last day of the month.",
        ),
        ("0 0 * * 5L", "Weekday '5l': write L5."),
        ("0 0 * * monday", "Weekday 'monday': unexpected word. Write mon."),
        ("0 0 * january *", "Month 'january': unexpected word. Write jan."),
        ("0 0 * * 5#6", "Weekday '5#6': the number after # must be 1 to 5."),
        (
            "0 0 * * 1,5#3",
            "Weekday '1,5#3': mixes plain weekdays with # or L. Use two schedules, or # for each.",
        ),
        ("60 * * * *", "Minute '60': must be from 0 to 59, in at most two digits."),
        ("007 * * * *", "Minute '007': must be from 0 to 59, in at most two digits."),
        ("0 0 0 * *", "Day '0': must be from 1 to 31, in at most two digits."),
        ("0 0 * * 8", "Weekday '8': must be from 0 to 7, in at most two digits."),
        ("1, * * * *", "Minute: empty item in the list. Remove the comma that is too much."),
        ("/5 * * * *", "Minute '/5': unexpected. Write *, 0, 0-59, */2."),
        ("*-5 * * * *", "Minute '*-5': unexpected. Write *, 0, 0-59, */2."),
        ("-5 * * * *", "Minute '-5': unexpected. Write *, 0, 0-59, */2."),
        ("L * * * *", "Minute 'l': unexpected. Write *, 0, 0-59, */2."),
        ("0 0 L5 * *", "Day 'l5': unexpected. Write *, 15, 1-7, */2, L."),
        ("0 0 5#3 * *", "Day '5#3': unexpected. Write *, 15, 1-7, */2, L."),
        ("0 0 * * L", "Weekday 'l': unexpected. Write *, 1-5, mon, 5#3, L5."),
        (
            "1_0 * * * *",
            "Cron rule: unexpected character '_'. "
            "Use digits, names such as jan or mon, and * , - / # L.",
        ),
        (
            "0 0 30 2 *",
            "Cron rule '0 0 30 2 *': never runs, none of its months has a day 30. "
            "Choose another day, or L for the last day of the month.",
        ),
        (
            "0 0 */28 2 1#3",
            "Cron rule '0 0 */28 2 1#3': never runs, no date fits its day, month and weekday. "
            "Choose another day or month.",
        ),
    ],
)
def test_refused_with_the_place_and_the_fix(expression: str, message: str) -> None:
    assert str(refusal(expression)) == message


@pytest.mark.parametrize(
    ("expression", "field", "token"),
    [
        ("H * * * *", "Minute", "h"),
        ("R 4 * * *", "Minute", "r"),
        ("0 H * * *", "Hour", "h"),
        ("0 0 H * *", "Day", "h"),
        ("0 0 * H *", "Month", "h"),
        ("0 0 * * H", "Weekday", "h"),
        ("H/15 * * * *", "Minute", "h/15"),
        ("H(0-29)/10 * * * *", "Minute", "h(0-29)/10"),
        ("0 H(0-7) * * *", "Hour", "h(0-7)"),
        ("H/0 * * * *", "Minute", "h/0"),
        ("H(50-99)/40 * * * *", "Minute", "h(50-99)/40"),
        ("0 0 H/25 * *", "Day", "h/25"),
    ],
)
def test_hashed_field_is_refused_with_a_number_that_is_accepted(
    expression: str, field: str, token: str
) -> None:
    error = refusal(expression)
    start = f"{field} '{token}': not supported, since nodes could compute different times. Write "
    assert str(error).startswith(start)
    fix = str(error).removeprefix(start).removesuffix(".")
    assert canonical(expression.lower().replace(token, fix))
    assert str(refusal(expression)) == str(error)


def test_number_instead_of_a_hash_is_that_of_the_schedule() -> None:
    found = set()
    for name in range(300):
        with pytest.raises(TimetableError) as caught:
            timetable.build(kind="cron", cron="H * * * *", spread_key=f"schedule {name}")
        found.add(str(caught.value).rpartition("Write ")[2])
    assert len(found) > 50


def test_hash_in_ranges_and_steps_stays_in_them() -> None:
    for name in range(60):
        with pytest.raises(TimetableError) as caught:
            canonical("H(10-49)/10 * * * *", spread_key=str(name))
        fix = str(caught.value).rpartition("Write ")[2].removesuffix(".")
        assert re.fullmatch(r"1[0-9]-49/10", fix)


@pytest.mark.parametrize(
    "character", ["+", ".", "\n", "\x00", "\u00a0", "\u00b9", "\u0660", "\u200b", "(", "é", "\r"]
)
def test_character_outside_the_grammar_is_named(character: str) -> None:
    error = refusal(f"{character}5 * * * *")
    assert error.token == character
    assert error.position == 0


def test_error_carries_the_token_and_its_offset() -> None:
    error = refusal("0  9 1,77 *   *")
    assert (error.token, error.position) == ("77", 6)


def test_suggested_spelling_is_itself_accepted() -> None:
    for expression in ["0 22-2 * * *", "0 0 * * fri-mon", "5/15 * * * *", "0 22-4/3 * * *"]:
        message = str(refusal(expression))
        found = re.search(r"'(\S+)': .* Write (\S+)\.", message)
        assert found is not None
        assert canonical(expression.replace(found[1], found[2]))


def test_text_of_201_characters_is_refused_by_length() -> None:
    text = "0," * 95 + "0 * * * *"
    assert canonical(text + " " * (200 - len(text))).endswith("0 * * * *")
    message = str(refusal(text + " " * (201 - len(text))))
    assert message == "Cron rule: 201 characters, at most 200. Use several schedules."


@pytest.mark.parametrize("value", [None, 5, b"* * * * *", ["*"]])
def test_value_that_is_no_text_is_refused(value: object) -> None:
    with pytest.raises(TimetableError, match="not text"):
        canonical(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "0," * 100_000 + "0 * * * *",
        "*" * 1_000_000,
        " " * 1_000_000,
        "1#5," * 10_000,
        "0-59," * 38 + "0 * * * *",
        "*/" + "9" * 190,
        "0 0 * * 1#" + "9" * 180,
        "5-" + "9" * 150 + "/" + "9" * 30 + " * * * *",
        "\u0661" * 200,
        "h" * 199,
        "@" * 200,
        "0 0 31 4,6,9,11 *",
        "0 0 */29 2 1#4",
    ],
)
def test_hostile_text_is_answered_within_50_ms(text: str) -> None:
    began = time.thread_time()
    try:
        timetable.build(kind="cron", cron=text)
    except TimetableError as error:
        assert len(str(error)) < 400
    assert time.thread_time() - began < 0.05


def test_any_text_is_accepted_or_refused_with_our_error() -> None:
    pick = random.Random("fuzz")
    alphabet = string.printable + "\u00e9\u0660*,-/#L0123456789     "
    for _ in range(3000):
        text = "".join(pick.choice(alphabet) for _ in range(pick.randint(0, 24)))
        try:
            canonical(text)
        except TimetableError:
            continue


def test_wildcard_rule_is_one_whose_minute_or_hour_starts_with_a_star() -> None:
    wildcards = {
        text: fields(text).wildcard
        for text in ["*/5 2 * * *", "5 * * * *", "5 */2 * * *", "0 0-23 * * *", "0-59 2 * * *"]
    }
    assert list(wildcards.values()) == [True, True, True, False, False]


def test_day_fields_are_ored_unless_one_starts_with_a_star() -> None:
    ored = [
        fields(f"0 0 {days}").day_or
        for days in ["13 * 5", "1-31 * 1", "1 * 0-6", "*/2 * 1", "1 * */2", "* * 1", "1 * *"]
    ]
    assert ored == [True, True, True, False, False, False, False]


def test_fields_expand_ranges_steps_names_and_specials() -> None:
    found = fields("*/20 22-23 15,L jan,dec 5#3,L0")
    assert found.minutes == {0, 20, 40}
    assert found.hours == {22, 23}
    assert found.days == {15}
    assert found.last_day
    assert found.months == {1, 12}
    assert found.weekdays == frozenset()
    assert found.nth_weekdays == {(5, 3)}
    assert found.last_weekdays == {0}


def test_weekday_7_is_sunday() -> None:
    assert fields("0 0 * * 5-7").weekdays == {0, 5, 6}
    assert fields("0 0 * * 7").weekdays == {0}
    assert fields("0 0 * * 7#2").nth_weekdays == {(0, 2)}
    assert fields("0 0 * * sat-sun").weekdays == {0, 6}


@pytest.mark.parametrize("column", ["0,*", "*,5", "1-3,*", "*/2,*", "*,*"])
def test_star_in_a_list_means_every_value(column: str) -> None:
    found = fields(f"{column} {column} 1,* 1,* 1,*")
    assert (found.minutes, found.hours) == (set(range(60)), set(range(24)))
    assert (found.days, found.months) == (set(range(1, 32)), set(range(1, 13)))
    assert found.weekdays == set(range(7))
    assert found.wildcard is column.startswith("*")


def test_full_range_means_every_value() -> None:
    assert fields("0-59 0-23 1-31 1-12 0-7") == fields("0-59 0-23 1-31 1-12 0-6")
    assert len(fields("0-59 0-23 1-31 1-12 0-7").minutes) == 60


def test_day_that_does_not_exist_contributes_nothing() -> None:
    rule = timetable.build(kind="cron", cron="0 0 31 2 0")
    assert rule.next_after(datetime(2026, 2, 1, tzinfo=UTC)) == datetime(2026, 2, 8, tzinfo=UTC)


def test_leap_day_on_a_monday_is_accepted() -> None:
    rule = timetable.build(kind="cron", cron="0 0 */28 2 1#5")
    assert rule.next_after(datetime(2026, 1, 1, tzinfo=UTC)) == datetime(2044, 2, 29, tzinfo=UTC)


def test_many_threads_get_the_same_answers() -> None:
    after = datetime(2026, 3, 7, 12, tzinfo=UTC)
    texts = [f"{minute} 2 * * *" for minute in range(60)]
    seen: list[list[datetime | None]] = []

    def compute() -> None:
        rules = [timetable.Cron(expression=text, timezone="America/New_York") for text in texts]
        seen.append([rule.next_after(after) for rule in rules])

    threads = [threading.Thread(target=compute) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen == [[datetime(2026, 3, 8, 7, tzinfo=UTC)] * 60] * 8
