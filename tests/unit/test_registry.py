"""Registering jobs, finding them by name, and checking arguments."""

from __future__ import annotations

import enum
import functools
import json
import random
import subprocess
import sys
import textwrap
from collections.abc import Callable
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distcron_app import JobContext, job, registry
from distcron_app.arguments import mask, masked_arguments
from distcron_app.errors import DuplicateJob, InvalidArguments, UnknownJob

if TYPE_CHECKING:
    from nowhere import Missing


class Size(enum.Enum):
    SMALL = "s"
    LARGE = "l"


class Shape(enum.Enum):
    POINT = (0, 0)
    LINE = (0, 1)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_jobs", dict(registry._jobs))


def registered(function: Callable[..., Any], **options: Any) -> registry.Job:
    job(name="test.job", **options)(function)
    return registry.get("test.job")


def problems_of(described: registry.Job, arguments: object) -> dict[str, str]:
    with pytest.raises(InvalidArguments) as caught:
        described.check(arguments)
    return caught.value.problems


def check_one(annotation: Any, value: object) -> object:
    def function(value):
        pass

    function.__annotations__ = {"value": annotation}
    return registered(function).check({"value": value})["value"]


def problem_of_one(annotation: Any, value: object) -> str:
    with pytest.raises(InvalidArguments) as caught:
        check_one(annotation, value)
    return caught.value.problems["value"]


# Names


def test_bare_decorator_names_the_job_by_module_and_function():
    @job
    def nightly() -> None:
        pass

    assert registry.get("tests.unit.test_registry.nightly").function is nightly


def test_default_name_leaves_out_a_last_module_jobs():
    def nightly_report() -> None:
        pass

    nightly_report.__module__ = "billing.jobs"
    job(nightly_report)
    assert registry.get("billing.nightly_report").function is nightly_report


def test_default_name_keeps_jobs_in_the_middle_of_a_path():
    def close() -> None:
        pass

    close.__module__ = "billing.jobs.monthly"
    job(close)
    assert registry.get("billing.jobs.monthly.close").function is close


def test_decorator_returns_the_function_itself():
    def plain() -> int:
        return 5

    assert job(name="test.plain")(plain) is plain


@pytest.mark.parametrize("name", ["", "1a", ".a", "_a", "a b", "a/b", "é", "a\n", "x" * 101])
def test_invalid_name_is_refused(name):
    with pytest.raises(ValueError, match="not a valid name"):
        job(name=name)(lambda: None)


def test_name_of_100_characters_is_accepted():
    job(name="x" * 100)(lambda: None)
    assert "x" * 100 in registry.names()


def test_callable_without_a_name_needs_one():
    with pytest.raises(TypeError, match="Pass @job"):
        job(functools.partial(print, "hi"))


def test_second_callable_under_a_name_is_refused():
    def first() -> None:
        pass

    def second() -> None:
        pass

    registered(first)
    with pytest.raises(DuplicateJob, match=r"registered by tests\.unit\.test_registry:\d+ and"):
        registered(second)


def test_same_function_after_a_reload_replaces_the_old_one():
    def load() -> Callable[[], None]:
        def reloaded() -> None:
            pass

        return reloaded

    registered(load())
    newer = load()
    assert registered(newer).function is newer


def test_unknown_name_lists_similar_ones():
    def nightly_report() -> None:
        pass

    job(name="billing.nightly_report")(nightly_report)
    with pytest.raises(UnknownJob, match=r"Did you mean 'billing\.nightly_report'\?"):
        registry.get("billing.jobs.nightly_report")
    with pytest.raises(UnknownJob) as caught:
        registry.get("nightly_report")
    assert caught.value.nearest == ("billing.nightly_report",)


def test_all_jobs_are_sorted_by_name():
    listed = [each.name for each in registry.all_jobs()]
    assert listed == sorted(listed) == registry.names()
    assert "distcron.shell_command" in listed


def test_autodiscovery_registers_the_jobs_of_installed_apps():
    assert {"project.demo.greet", "project.demo.slow_report"} <= set(registry.names())


HOSTILE = [
    "os.system", "__class__", "builtins.eval", "__import__('os').system('id')", "../jobs",
    "distcron.shell_command\x00", "distcron.shell_command ", "DISTCRON.SHELL_COMMAND",
    "distcron\u2024shell_command", "ｄistcron.shell_command", "dіstcron.shell_command",
    "antigravity", "this", "subprocess.run", "x" * 70_000, "a." * 40_000, "\ud800", "", " ",
    "${jndi:ldap://x}", "{{7*7}}", "'; DROP TABLE x; --", "\r\nevent=forged", "*", "None",
]  # fmt: skip


def test_five_thousand_hostile_names_are_unknown_and_import_nothing():
    generator = random.Random(20260131)
    alphabet = "abcxyz._-:/\\'\"()[]{}%$\x00\n\u202e\u2024é😀 "
    names = HOSTILE + [
        "".join(generator.choices(alphabet, k=generator.randint(1, 60))) for _ in range(2500)
    ]
    names += [f"{module}.{attribute}" for module in ("os", "antigravity", "wsgiref")
              for attribute in (f"run{n}" for n in range(850))]  # fmt: skip
    imported, watching = [], True

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        if watching and event in ("import", "exec", "compile", "os.system", "subprocess.Popen"):
            imported.append((event, arguments[0]))

    sys.addaudithook(watch)
    unknown = 0
    for name in names:
        try:
            registry.get(name)
        except UnknownJob:
            unknown += 1
    watching = False
    assert (unknown, imported) == (len(names), [])
    assert unknown >= 5000


def test_message_of_a_huge_unknown_name_is_short():
    with pytest.raises(UnknownJob) as caught:
        registry.get("x" * 70_000)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", [None, 5, ["a"], {}])
def test_name_that_is_not_text_is_unknown(name):
    with pytest.raises(UnknownJob):
        registry.get(name)


# What a job says about itself


def test_docstring_gives_summary_and_help():
    def report(day, count=1, *, note="", **extra):
        """Mail the report.

        It takes a while.

        Args:
            day: Day to report on.
            count (int): How many copies, at least
                one: always.

            note: Text below the title.

        Returns:
            nothing: at all.
        """

    described = registered(report)
    assert described.summary == "Mail the report."
    assert [each.help for each in described.parameters] == [
        "Day to report on.",
        "How many copies, at least one: always.",
        "Text below the title.",
    ]


def test_parameters_tell_required_and_default():
    def report(day: date, count: int = 3) -> None:
        pass

    day, count = registered(report).parameters
    assert (day.name, day.is_required, day.type.kind) == ("day", True, "date")
    assert (count.name, count.is_required, count.default, count.type.kind) == (
        "count", False, 3, "int",
    )  # fmt: skip


def test_source_names_module_and_line():
    def here() -> None:
        pass

    line = here.__code__.co_firstlineno
    assert registered(here).source == f"tests.unit.test_registry:{line}"


def test_async_is_recognised():
    async def fetch() -> None:
        pass

    assert registered(fetch).is_async is True


def test_permission_is_kept():
    assert registered(lambda: None, permission="billing.close").permission == "billing.close"


def test_annotated_context_is_no_argument():
    def report(size: int, control: JobContext) -> None:
        pass

    described = registered(report)
    assert [each.name for each in described.parameters] == ["size"]
    assert described.signature.context_parameter == "control"


def test_first_parameter_named_ctx_is_the_context():
    assert registered(lambda ctx, size: None).signature.context_parameter == "ctx"


def test_later_parameter_named_ctx_is_an_argument():
    described = registered(lambda size, ctx: None)
    assert described.takes_context is False
    assert [each.name for each in described.parameters] == ["size", "ctx"]


def test_context_cannot_be_given_as_an_argument():
    assert problems_of(registered(lambda ctx: None), {"ctx": 1}) == {
        "ctx": "is filled by the scheduler. Remove it."
    }


def test_two_contexts_are_refused():
    def greedy(ctx: JobContext, again: JobContext) -> None:
        pass

    with pytest.raises(TypeError, match="'ctx' and 'again' both ask"):
        registered(greedy)


def test_positional_only_parameter_is_refused():
    def strict(size, /):
        pass

    with pytest.raises(TypeError, match="'size' is positional-only"):
        registered(strict)


def test_generator_is_refused():
    def lazy():
        yield 1

    with pytest.raises(TypeError, match="is a generator"):
        registered(lazy)


def test_one_unresolvable_annotation_spoils_no_other():
    def report(thing: Missing, size: int, control: JobContext) -> None:
        pass

    described = registered(report)
    assert described.takes_context is True
    assert described.check({"thing": [1], "size": 2}) == {"thing": [1], "size": 2}
    assert list(problems_of(described, {"thing": 1, "size": "2"})) == ["size"]


def test_wrapped_function_keeps_its_signature():
    def report(size: int) -> None:
        pass

    @functools.wraps(report)
    def wrapper(*args, **kwargs):
        return report(*args, **kwargs)

    assert [each.name for each in registered(wrapper).parameters] == ["size"]


# Types


@pytest.mark.parametrize(
    ("annotation", "value", "expected"),
    [
        (str, "a 👩‍🚀", "a 👩‍🚀"),
        (int, 5, 5),
        (int, -(2**70), -(2**70)),
        (float, 2, 2.0),
        (float, 2.5, 2.5),
        (bool, True, True),
        (Decimal, "12.50", Decimal("12.50")),
        (Decimal, 0.1, Decimal("0.1")),
        (date, "2024-02-29", date(2024, 2, 29)),
        (datetime, "2026-01-31T08:00:00Z", datetime(2026, 1, 31, 8, 0, tzinfo=UTC)),
        (datetime, "2026-01-31T08:00:00+07:00", datetime(2026, 1, 31, 1, 0, tzinfo=UTC)),
        (Size, "l", Size.LARGE),
        (Shape, "LINE", Shape.LINE),
        (Literal["en", "id"], "id", "id"),
        (Literal[1, 2, None], None, None),
        (list[date], ["2026-01-31"], [date(2026, 1, 31)]),
        (list[list[int]], [[1], []], [[1], []]),
        (list, [1, "a"], [1, "a"]),
        (int | None, None, None),
        (int | None, 3, 3),
        (list[Size | None], ["s", None], [Size.SMALL, None]),
        (dict, {"a": 1}, {"a": 1}),
        (dict[str, int], {"a": 1}, {"a": 1}),
        (Any, {"a": [None]}, {"a": [None]}),
        (int | str, "x", "x"),
        (object, 5, 5),
    ],
)
def test_value_is_converted(annotation, value, expected):
    converted = check_one(annotation, value)
    assert (converted, type(converted)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("annotation", "value", "message"),
    [
        (str, 5, "must be text, got 5."),
        (int, "5", "must be a whole number such as 5, got '5'."),
        (int, True, "must be a whole number such as 5, got True."),
        (int, 5.0, "must be a whole number such as 5, got 5.0."),
        (int, None, "must be a whole number such as 5, got None."),
        (float, False, "must be a number such as 2.5, got False."),
        (bool, 1, "must be true or false, got 1."),
        (Decimal, "1,5", "must be a decimal number such as \"12.50\", got '1,5'."),
        (Decimal, "NaN", "must be a decimal number such as \"12.50\", got 'NaN'."),
        (date, "2023-02-29", "must be a date such as \"2026-01-31\", got '2023-02-29'."),
        (date, 20260131, 'must be a date such as "2026-01-31", got 20260131.'),
        (
            datetime,
            "2026-01-31T08:00:00",
            'must be a date and time with an offset such as "2026-01-31T08:00:00+07:00", '
            "got '2026-01-31T08:00:00'.",
        ),
        (Size, "XL", 'must be one of "s", "l", got \'XL\'.'),
        (Literal["en", "id"], "de", 'must be one of "en", "id", got \'de\'.'),
        (Literal[1, 2], True, "must be one of 1, 2, got True."),
        (list[int], 5, "must be a list such as [1, 2], got 5."),
        (list[int], [1, "b"], "item 2: must be a whole number such as 5, got 'b'."),
        (dict, [], 'must be an object such as {"size": 5}, got [].'),
    ],
)
def test_wrong_value_says_what_is_allowed(annotation, value, message):
    assert problem_of_one(annotation, value) == message


def test_number_too_large_for_float_is_refused():
    assert problem_of_one(float, 10**400).startswith("must be a number such as 2.5")


def test_default_of_none_allows_null():
    def report(size: int = None) -> None:  # noqa: RUF013
        pass

    assert registered(report).check({"size": None}) == {"size": None}


# Whole objects


def test_every_problem_is_listed_at_once():
    def report(day: date, size: int, language: str = "en") -> None:
        pass

    assert problems_of(registered(report), {"size": "x", "langauge": "id"}) == {
        "day": "is required.",
        "size": "must be a whole number such as 5, got 'x'.",
        "langauge": "is not a parameter. Did you mean 'language'?",
    }


def test_unknown_parameter_without_a_near_one_lists_the_allowed():
    assert problems_of(registered(lambda a=1, b=2: None), {"zzz": 1}) == {
        "zzz": "is not a parameter. Allowed: a, b."
    }


def test_job_without_parameters_says_so():
    assert problems_of(registered(lambda: None), {"x": 1}) == {
        "x": "is not a parameter. Allowed: none."
    }


def test_keyword_rest_takes_any_json():
    described = registered(lambda size, **rest: None)
    assert described.check({"size": 1, "other": [1]}) == {"size": 1, "other": [1]}


def test_defaults_are_not_filled_in():
    assert registered(lambda size=5: None).check({}) == {}


@pytest.mark.parametrize("arguments", [None, [], "{}", 5, (("a", 1),)])
def test_arguments_must_be_an_object(arguments):
    assert "must be a JSON object" in problems_of(registered(lambda **rest: None), arguments)["*"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), [float("nan")]])
def test_nan_and_infinity_are_refused(value):
    assert problems_of(registered(lambda **rest: None), {"x": value}) == {
        "*": "must not contain NaN or Infinity; JSON has neither."
    }


@pytest.mark.parametrize("value", ["a\x00", "\ud800", {"\x00": 1}, ["\udfff"]])
def test_text_that_no_database_stores_is_refused(value):
    assert "NUL" in problems_of(registered(lambda **rest: None), {"x": value})["*"]


@pytest.mark.parametrize("value", [b"x", {1}, object(), Decimal(1), date(2026, 1, 1), (1,)])
def test_python_values_are_not_json(value):
    assert "must be JSON, got" in problems_of(registered(lambda **rest: None), {"x": value})["*"]


def test_keys_must_be_text():
    described = registered(lambda **rest: None)
    assert problems_of(described, {"x": {1: 2}}) == {"*": "must have text as keys, got 1."}


def nested(levels: int) -> dict[str, Any]:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def test_ten_levels_are_accepted_and_eleven_refused():
    described = registered(lambda **rest: None)
    assert described.check(nested(10)) == nested(10)
    assert problems_of(described, nested(11)) == {"*": "must be nested at most 10 levels deep."}


def test_object_that_contains_itself_is_refused():
    loop: dict[str, Any] = {}
    loop["self"] = loop
    assert "10 levels" in problems_of(registered(lambda **rest: None), loop)["*"]


def test_shared_references_do_not_multiply_the_work():
    value: Any = [0] * 10
    for _ in range(8):
        value = [value] * 10
    assert "16384 bytes" in problems_of(registered(lambda **rest: None), {"x": value})["*"]


def test_sixteen_kilobytes_are_accepted_and_one_byte_more_refused():
    described = registered(lambda text: None)
    largest = {"text": "x" * (16_384 - len('{"text":""}'))}
    assert described.check(largest) == largest
    assert "16384 bytes" in problems_of(described, {"text": largest["text"] + "x"})["*"]


def test_size_counts_bytes_of_emoji():
    assert "16384 bytes" in problems_of(registered(lambda text: None), {"text": "😀" * 4100})["*"]


def test_integer_of_five_thousand_digits_is_refused():
    described = registered(lambda **rest: None)
    assert "16384 bytes" in problems_of(described, {"x": 10**5000})["*"]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=9),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=15,
)


@given(json_values)
def test_any_json_is_accepted_unchanged_or_refused_clearly(value):
    described = registry.Job(
        name="test.any",
        function=print,
        summary="",
        signature=registry.Signature(parameters=(), context_parameter=None, accepts_extra=True),
        is_async=False,
        source="",
    )
    try:
        checked = described.check({"x": value})
    except InvalidArguments as error:
        assert set(error.problems) == {"*"}
    else:
        assert json.loads(json.dumps(checked, allow_nan=False).encode()) == {"x": value}


@given(json_values)
def test_no_json_crashes_a_typed_parameter(value):
    for annotation in (int, float, Decimal, date, datetime, Size, list[datetime], bool | None):
        described = registry._describe(_annotated(annotation), "test.typed", None, None)
        try:
            described.check({"value": value})
        except InvalidArguments as error:
            assert set(error.problems) <= {"*", "value"}


def _annotated(annotation: Any) -> Callable[..., None]:
    def function(value):
        pass

    function.__annotations__ = {"value": annotation}
    return function


# dump, parse, validate


def test_dump_gives_the_json_form_that_check_reads_back():
    def report(day: date, at: datetime, price: Decimal, size: Size, shapes: list[Shape]) -> None:
        pass

    described = registered(report)
    values = {
        "day": date(2026, 1, 31),
        "at": datetime(2026, 1, 31, 8, 0, tzinfo=UTC),
        "price": Decimal("9.90"),
        "size": Size.SMALL,
        "shapes": [Shape.LINE],
    }
    form = described.dump(values)
    assert form == {
        "day": "2026-01-31",
        "at": "2026-01-31T08:00:00+00:00",
        "price": "9.90",
        "size": "s",
        "shapes": ["LINE"],
    }
    assert described.check(form) == values


def test_dump_refuses_what_check_refuses():
    with pytest.raises(InvalidArguments, match="size: is required"):
        registered(lambda size: None).dump({})


def test_dump_refuses_a_value_that_contains_itself():
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(InvalidArguments, match="must not contain itself"):
        registered(lambda x: None).dump({"x": loop})


def test_parse_reads_typed_json():
    assert registered(lambda name: None).parse('{"name": "👋"}') == {"name": "👋"}


def test_parse_of_nothing_is_no_arguments():
    assert registered(lambda: None).parse("") == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "must not give 'a' twice."),
        ("{'a': 1}", "must be JSON: Expecting property name enclosed in double quotes at line 1"),
        ('{"a": NaN}', "must not contain NaN"),
        ('{"a": 1e999}', "must not contain NaN or Infinity"),
        ("[" * 100_000, ""),
        ('{"a": ' + "9" * 5000 + "}", ""),
        ("[]", "must be a JSON object"),
    ],
)
def test_parse_refuses_what_json_should_not_hold(text, message):
    with pytest.raises(InvalidArguments) as caught:
        registered(lambda a=1: None).parse(text)
    assert message in caught.value.problems["*"]


def test_own_validation_sees_converted_values():
    seen = []
    described = registered(_annotated(date), validate=lambda value: seen.append(value))
    described.check({"value": "2026-01-31"})
    assert seen == [date(2026, 1, 31)]


def test_own_validation_refuses_with_its_message():
    def validate(size: int) -> None:
        raise ValueError("Size must be even.")

    assert problems_of(registered(lambda size: None, validate=validate), {"size": 3}) == {
        "*": "Size must be even."
    }


def test_own_validation_runs_only_on_well_formed_arguments():
    described = registered(_annotated(int), validate=lambda value: 1 / 0)
    assert list(problems_of(described, {"value": "x"})) == ["value"]


# Secrets


@pytest.mark.parametrize(
    "name",
    ["password", "db_password", "API_KEY", "apiKey", "authToken", "client-secret", "credentials"],
)
def test_value_under_a_secret_name_is_masked(name):
    assert masked_arguments({name: "hunter2"}) == {name: "••••"}


@pytest.mark.parametrize("name", ["monkey", "author", "tokenizer", "keyboard", "name"])
def test_value_under_an_ordinary_name_is_shown(name):
    assert masked_arguments({name: "x"}) == {name: "x"}


def test_masking_reaches_into_objects_and_lists_and_copies():
    given_arguments = {"hosts": [{"url": "u", "token": "abcd1234"}], "size": 5}
    assert masked_arguments(given_arguments) == {
        "hosts": [{"url": "u", "token": "••••"}],
        "size": 5,
    }
    assert given_arguments["hosts"][0]["token"] == "abcd1234"


def test_secret_values_are_found_in_text_in_every_written_form():
    arguments = {"password": "p@ss'\nwörd", "nested": {"api_key": [12345678]}, "size": 5000}
    text = f"{arguments['password']} {arguments!r} {json.dumps(arguments)} p%40ss%27%0Aw%C3%B6rd"
    masked = mask(text, arguments)
    for form in ("wörd", "w\\u00f6rd", "w%C3%B6rd", "12345678"):
        assert form not in masked
    assert "5000" in masked


def test_longer_secret_is_masked_whole_when_a_shorter_one_begins_it():
    arguments = {"token": "abcd", "key": "abcdefgh"}
    assert mask("x abcdefgh abcd y", arguments) == "x •••• •••• y"


def test_short_values_and_flags_are_not_searched_for():
    arguments = {"key": "abc", "auth": True, "token": None, "secret": ""}
    assert mask("abc True None", arguments) == "abc True None"


def test_discovery_needs_no_database_and_no_models():
    code = textwrap.dedent("""
        import sys
        from distcron_app import job, registry

        @job(name="demo.alone")
        def alone(size: int = 1):
            pass

        assert registry.get("demo.alone").check({"size": 2}) == {"size": 2}
        assert "django.db" not in sys.modules, "registry imports the database layer"
    """)
    subprocess.run([sys.executable, "-c", code], check=True)
