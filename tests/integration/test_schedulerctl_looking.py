"""The verbs that only look: list, next, nodes, locks and status."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from django.test import override_settings

from distcron_app.instants import database_now
from distcron_app.locks import get_backend
from distcron_app.models import Schedule
from tests.integration.schedulerctl_builders import FAR, ctl, make_node, make_run, make_schedule

pytestmark = pytest.mark.django_db

RULE = ("30 2 * * *", "--tz", "America/New_York", "--from", "2027-03-13")


@pytest.fixture
def memory_locks() -> Iterator[None]:
    with override_settings(DISTCRON={"LOCK_BACKEND": "memory"}):
        yield


@pytest.fixture
def no_redis() -> Iterator[None]:
    cache = {
        "BACKEND": "django_redis.cache.RedisCache",
        "LOCATION": "redis://127.0.0.1:1/0",  # nobody listens there
        "OPTIONS": {"SOCKET_TIMEOUT": 0.2, "SOCKET_CONNECT_TIMEOUT": 0.2},
    }
    with override_settings(CACHES={"distcron": cache}, DISTCRON={"LOCK_BACKEND": "redis"}):
        yield


class TestList:
    def test_without_schedules_says_what_to_do(self) -> None:
        answer = ctl("list")

        assert answer.out == ""
        assert answer.error == (
            "No schedules yet. Add one in the admin, under Schedules.\n"
            'To try a rule first: schedulerctl next "30 2 * * *"\n'
        )

    def test_shows_state_words_outcome_and_next(self) -> None:
        schedule = make_schedule()
        Schedule.objects.filter(pk=schedule.pk).update(next_run_at=FAR)
        make_run(schedule, "succeeded")

        header, row = ctl("list").lines

        assert header.split() == ["STATE", "KEY", "WHEN", "LAST", "NEXT"]
        assert row.startswith(
            "● active  invoice-close  At 02:00 every day  ✔ succeeded 4 m ago  "
            "Sun 01 Jan 2090 07:00 WIB in "
        )

    def test_times_can_be_shown_in_utc(self) -> None:
        Schedule.objects.filter(pk=make_schedule().pk).update(next_run_at=FAR)

        assert "Sun 01 Jan 2090 00:00 UTC in " in ctl("list", "--utc").out

    def test_a_schedule_whose_last_outcome_is_failed_is_failing(self) -> None:
        make_run(make_schedule("good"), "succeeded")
        bad = make_schedule("bad")
        make_run(bad, "failed", error="Boom")
        make_run(bad, "skipped")

        answer = ctl("list", "--failing", "--no-header")

        assert [line.split()[:3] for line in answer.lines] == [["✖", "failing", "bad"]]
        assert answer.error == "1 of 2, filters: failing\n"

    def test_a_schedule_with_an_active_run_is_running(self) -> None:
        make_run(make_schedule(), "running")

        assert ctl("list", "--no-header").out.startswith("▶ running  invoice-close")

    def test_filters_by_the_word_that_the_table_shows(self) -> None:
        make_schedule("over", kind="once", cron="", run_at=database_now())
        make_schedule("on")

        answer = ctl("list", "--state", "finished", "--no-header")

        assert [line.split()[:3] for line in answer.lines] == [["■", "finished", "over"]]

    def test_filters_by_part_of_the_job_name(self) -> None:
        make_schedule("one")
        make_schedule("two", job="project.demo.heartbeat", arguments={})

        answer = ctl("list", "--job", "heart", "--json")

        assert [each["key"] for each in answer.data["schedules"]] == ["two"]

    def test_json_has_these_keys(self) -> None:
        schedule = make_schedule()
        Schedule.objects.filter(pk=schedule.pk).update(next_run_at=FAR)
        run = make_run(schedule, "failed", reason="error", error="Boom", finished_at=FAR)

        assert ctl("list", "--json").data == {
            "version": 1,
            "verb": "list",
            "schedules": [
                {
                    "key": "invoice-close",
                    "name": "invoice-close",
                    "job": "project.demo.invoice_close",
                    "state": "active",
                    "state_reason": "",
                    "state_by": "",
                    "paused_until": None,
                    "failing": True,
                    "queue": "default",
                    "priority": 0,
                    "kind": "cron",
                    "rule": "0 2 * * *",
                    "defined_in": "",
                    "left_code_at": None,
                    "timezone": "Asia/Jakarta",
                    "words": "At 02:00 every day",
                    "next_run_at": "2090-01-01T00:00:00Z",
                    "active_run_id": None,
                    "over_limit_at": None,
                    "starts": [],
                    "started_by": [],
                    "last_outcome": {
                        "run": run.pk,
                        "state": "failed",
                        "reason": "error",
                        "finished_at": "2090-01-01T00:00:00Z",
                        "error": "Boom",
                    },
                }
            ],
        }

    def test_json_keys_and_states_are_not_translated(self) -> None:
        make_schedule()

        (there,) = ctl("list", "--json", "--lang", "id").data["schedules"]

        assert list(there) == list(ctl("list", "--json").data["schedules"][0])
        assert (there["state"], there["kind"]) == ("active", "cron")

    def test_costs_the_same_queries_for_any_number_of_schedules(
        self, django_assert_num_queries: object
    ) -> None:
        for number in range(7):
            make_run(make_schedule(f"s{number}"), "succeeded")

        with django_assert_num_queries(6):  # type: ignore[operator]
            ctl("list")

    def test_an_escape_sequence_in_a_reason_is_not_sent_to_the_terminal(self) -> None:
        make_schedule(state="paused", state_reason="a\x1b[31mb")

        assert "a\\x1b[31mb" in ctl("list", "--wide").out

    def test_a_stream_without_utf8_gets_ascii_symbols(self) -> None:
        make_schedule(state="paused", state_reason="naïve 日")

        answer = ctl("list", "--wide", "--no-header", encoding="ascii")

        assert answer.out.startswith("= paused  invoice-close")
        assert answer.out.rstrip().endswith("na\\xefve \\u65e5")


class TestNext:
    def test_shows_zone_utc_distance_and_the_gap(self) -> None:
        lines = ctl("next", *RULE, "-n", "2").lines

        assert lines[0] == "At 02:30 every day (America/New_York)"
        assert lines[1].startswith("  Sat 13 Mar 2027 02:30 EST  07:30 UTC  ")
        assert lines[2].startswith("  Sun 14 Mar 2027 03:00 EDT  07:00 UTC  ")
        assert lines[2].endswith(
            "⚠ 02:30 does not exist on 14 March 2027 in America/New_York: runs at 03:00 instead."
        )

    def test_json_has_these_keys(self) -> None:
        assert ctl("next", *RULE, "-n", "2", "--json").data == {
            "version": 1,
            "verb": "next",
            "key": None,
            "rule": "30 2 * * *",
            "timezone": "America/New_York",
            "words": "At 02:30 every day",
            "state": None,
            "spread_seconds": 0,
            "runs_planned": 0,
            "max_runs": None,
            "marks": [],
            "occurrences": [
                {
                    "scheduled_at": "2027-03-13T07:30:00Z",
                    "due_at": "2027-03-13T07:30:00Z",
                    "local": "2027-03-13T02:30:00-05:00",
                    "clock_change": None,
                    "wall": None,
                    "marks": [],
                    "note": "",
                    "excluded": "",
                },
                {
                    "scheduled_at": "2027-03-14T07:00:00Z",
                    "due_at": "2027-03-14T07:00:00Z",
                    "local": "2027-03-14T03:00:00-04:00",
                    "clock_change": "gap",
                    "wall": "2027-03-14T02:30:00",
                    "marks": ["gap"],
                    "note": "02:30 does not exist on 14 March 2027 in America/New_York: "
                    "runs at 03:00 instead.",
                    "excluded": "",
                },
            ],
        }

    def test_a_repeated_wall_time_is_marked_as_fold(self) -> None:
        answer = ctl(
            "next", "30 1 * * *", "--tz", "America/New_York", "--from", "2027-11-07", "--json"
        )

        first, second = answer.data["occurrences"][:2]
        assert (first["scheduled_at"], first["clock_change"]) == ("2027-11-07T05:30:00Z", "fold")
        assert second["scheduled_at"] == "2027-11-08T06:30:00Z"

    def test_weekday_names_follow_the_language(self) -> None:
        assert "  Sab 13 Mar 2027 02:30 EST" in ctl("next", *RULE, "-n", "1", "--lang", "id").out

    def test_a_start_with_an_offset_is_that_instant(self) -> None:
        answer = ctl(
            "next", "0 * * * *", "--tz", "UTC", "--from", "2027-01-01T00:00+07:00", "-n1", "--json"
        )

        assert answer.data["occurrences"][0]["scheduled_at"] == "2026-12-31T17:00:00Z"

    def test_a_key_names_a_schedule_with_its_own_bounds(self) -> None:
        make_schedule(ends_at=FAR)

        answer = ctl("next", "invoice-close", "--from", "2089-12-31", "--json")

        assert [each["scheduled_at"] for each in answer.data["occurrences"]] == [
            "2089-12-30T19:00:00Z",
            "2089-12-31T19:00:00Z",
        ]

    def test_a_paused_schedule_says_that_nothing_runs(self) -> None:
        make_schedule(state="paused")

        answer = ctl("next", "invoice-close")

        assert answer.error == "The schedule is paused: nothing runs until it is resumed.\n"
        assert len(answer.lines) == 6

    @pytest.mark.parametrize(
        ("words", "code", "error"),
        [
            (["0 25 * * *"], 2, "Hour '25': must be from 0 to 23, in at most two digits."),
            (["0 0 30 2 *"], 2, "none of its months has a day 30"),
            (["@daily", "--tz", "Asia/Jakata"], 2, "Did you mean Asia/Jakarta?"),
            (["@daily", "--from", "soon"], 2, "--from 'soon': not a date or time."),
            (["@daily", "-n", "0"], 1, "got '0', allowed 1 to 1000"),
            (["@daily", "--lang", "xx"], 2, "--lang 'xx': not a language of this project."),
        ],
    )
    def test_refuses_what_it_cannot_read(self, words: list[str], code: int, error: str) -> None:
        answer = ctl("next", *words)

        assert error in answer.error
        # The parser's own refusals get their code, 2, only from a shell.
        assert (answer.code, answer.out) == (code, "")

    def test_an_unknown_key_names_the_nearest(self) -> None:
        make_schedule()

        answer = ctl("next", "invoice-clos")

        assert answer.code == 4
        assert answer.error == "schedule 'invoice-clos': not found. Did you mean invoice-close?"


class TestNodes:
    def test_without_a_node_the_exit_code_is_1(self) -> None:
        answer = ctl("nodes")

        assert answer.code == 1
        assert answer.error == "no node is alive. Start one: manage.py runscheduler"

    def test_state_is_computed_from_heartbeat_and_lease(self) -> None:
        make_node("a", heartbeat_age_seconds=1)
        make_node("b", heartbeat_age_seconds=9)
        make_node("c", heartbeat_age_seconds=60)
        make_node("d", state="draining")
        make_node("e", state="left")

        answer = ctl("nodes", "--json")

        assert [(each["name"], each["state"]) for each in answer.data["nodes"]] == [
            ("a", "alive"),
            ("b", "suspect"),
            ("c", "dead"),
            ("d", "draining"),
        ]
        assert answer.code == 0

    def test_all_includes_nodes_that_left_or_died(self) -> None:
        make_node("e", state="left")
        make_node("f", state="dead")

        answer = ctl("nodes", "--all", "--no-header")

        assert [line.split()[:3] for line in answer.lines] == [
            ["■", "left", "e"],
            ["✖", "dead", "f"],
        ]
        assert answer.code == 1

    def test_shows_process_lag_slots_clock_and_alert(self) -> None:
        make_node(running=3, tick_lag_ms=12, clock_offset_ms=-11, alert="redis away")

        assert ctl("nodes", "--no-header").out == (
            "✔ alive  web-1  app-1:3990  0.1.0  1 s ago  12 ms  3/16  all  -11 ms  redis away\n"
        )

    def test_json_has_these_keys(self) -> None:
        node = make_node()

        (facts,) = ctl("nodes", "--json").data["nodes"]

        assert facts.pop("heartbeat_age_seconds") >= 1.0
        assert facts.pop("heartbeat_at") < facts.pop("expires_at")
        assert facts == {
            "id": str(node.id),
            "name": "web-1",
            "state": "alive",
            "host": "app-1",
            "pid": 3990,
            "version": "0.1.0",
            "zone_data": "",
            "started_at": "2026-01-02T03:04:00Z",
            "tick_lag_ms": 0,
            "running": 0,
            "slots": 16,
            "queues": [],
            "clock_offset_ms": 0,
            "alert": "",
        }


@pytest.mark.usefixtures("memory_locks")
class TestLocks:
    def test_a_lock_whose_run_is_alive_is_healthy(self) -> None:
        schedule = make_schedule()
        run = make_run(schedule, "running", node=make_node(), fencing_token=7)
        get_backend().acquire({f"schedule:{schedule.pk}": "f" * 32}, 60_000)

        document = ctl("locks", "--json").data

        (facts,) = document["locks"]
        assert 50_000 < facts.pop("ttl_ms") <= 60_000
        assert facts.pop("holder") != ""
        # What a backend knows beyond this differs from one to the other.
        assert facts.keys() >= {"granted_ms", "age_ms", "renewals"}
        for name in ("granted_ms", "age_ms", "renewals"):
            del facts[name]
        assert facts == {
            "name": f"schedule:{schedule.pk}",
            "level": "standard",
            "schedule": "invoice-close",
            "concurrency_key": "",
            "owner_token": "f" * 32,
            "node": "web-1",
            "node_state": "alive",
            "run": run.pk,
            "fencing_token": 7,
            "verdict": "healthy",
            "why": "Its run is active and its node is alive.",
        }
        assert {name: document[name] for name in ("version", "verb", "backend")} == {
            "version": 1,
            "verb": "locks",
            "backend": "memory",
        }

    @pytest.mark.parametrize(
        ("heartbeat_age_seconds", "owner_token"), [(60, "f" * 32), (1, "a" * 32)]
    )
    def test_a_lock_of_a_dead_node_or_another_owner_expires_by_itself(
        self, heartbeat_age_seconds: float, owner_token: str
    ) -> None:
        schedule = make_schedule()
        node = make_node(heartbeat_age_seconds=heartbeat_age_seconds)
        make_run(schedule, "running", node=node)
        get_backend().acquire({f"schedule:{schedule.pk}": owner_token}, 60_000)

        assert ctl("locks", "--no-header").out.rstrip().endswith("○ expires by itself")

    def test_a_lock_of_a_foreign_name_has_no_schedule(self) -> None:
        get_backend().acquire({"schedule:99999999999999999999": "f" * 32}, 60_000)

        (facts,) = ctl("locks", "--json").data["locks"]

        assert (facts["schedule"], facts["run"], facts["verdict"]) == (None, None, "expires")

    def test_without_locks_says_which_backend_was_asked(self) -> None:
        answer = ctl("locks")

        assert (answer.code, answer.out) == (0, "")
        assert answer.error == "No lock is held (backend: memory).\n"


@pytest.mark.usefixtures("memory_locks")
class TestStatus:
    def test_all_well_exits_with_0(self) -> None:
        make_schedule()
        make_node()

        answer = ctl("status")

        assert (answer.code, answer.error) == (0, "")
        assert "✔ ok  nodes           1 alive\n" in answer.out
        assert "✔ ok  schedules       1 active\n" in answer.out

    def test_json_has_these_keys(self) -> None:
        make_schedule()
        make_schedule("off", state="paused")
        make_run(make_schedule("bad"), "failed")
        make_run(make_schedule("busy"), "running", node=make_node())

        document = ctl("status", "--json").data

        assert document.pop("at").endswith("Z")
        assert document["database"].pop("ping_ms") >= 0
        assert set(document.pop("database")) == {"name"}
        assert document["locks"].pop("ping_ms") >= 0
        assert document == {
            "version": 1,
            "verb": "status",
            "distcron": "0.1.0",
            "healthy": True,
            "problems": [],
            "warnings": [],
            "locks": {"backend": "memory", "answers": True, "problem": ""},
            "nodes": {"alive": 1, "suspect": 0},
            "schedules": {"active": 3, "paused": 1, "exhausted": 0, "invalid": 0},
            "overdue": 0,
            "running": 1,
            "over_limit": 0,
            "queued": 0,
            "lost_24h": 0,
            "failed_24h": 1,
            "maintenance": False,
        }

    def test_no_node_overdue_and_lost_are_problems(self) -> None:
        """OP-52."""
        schedule = make_schedule()
        make_run(schedule, "lost")
        Schedule.objects.filter(pk=schedule.pk).update(next_run_at="2020-01-01T00:00:00Z")

        answer = ctl("status")

        assert answer.code == 1
        assert answer.error == (
            "unhealthy: no node is alive; overdue schedules: 1; runs lost in 24 h: 1"
        )

    def test_a_run_lost_days_ago_is_no_problem_any_more(self) -> None:
        make_node()
        make_run(make_schedule(), "lost", finished_at="2020-01-01T00:00:00Z")

        assert ctl("status").code == 0


@pytest.mark.usefixtures("no_redis")
class TestWithoutRedis:
    def test_locks_exits_with_6(self) -> None:
        answer = ctl("locks")

        assert (answer.code, answer.out) == (6, "")
        assert answer.error.startswith("Lock backend 'redis': unavailable")

    def test_status_shows_the_rest_and_exits_with_6(self) -> None:
        make_node()

        answer = ctl("status", "--json")

        assert answer.code == 6
        assert answer.data["locks"]["answers"] is False
        assert answer.data["nodes"]["alive"] == 1

    def test_list_next_and_nodes_need_no_redis(self) -> None:
        make_schedule()
        make_node()

        codes = [ctl(*words).code for words in (["list"], ["next", "invoice-close"], ["nodes"])]

        assert codes == [0, 0, 0]
