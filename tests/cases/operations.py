"""Which tests show the operational cases about locks, and the faults of locks.

A case is what public bug reports say goes wrong in schedulers of this kind (OP) or a fault
that tests make on purpose (F). The docstring of each test begins with its cases.
"""

from __future__ import annotations

__all__ = ["LOCK_CASES"]

_CONTRACTS = "tests/contracts/test_{}.py::"
_SYSTEM = "tests/system/test_{}.py::"
_LOCKS = _CONTRACTS.format("locks")
_REDIS = _CONTRACTS.format("redis_faults")
_FAILOVER = _CONTRACTS.format("failover")
_QUORUM = _CONTRACTS.format("redlock_faults")
_CASES = _SYSTEM.format("lock_cases")
_LEVELS = _SYSTEM.format("lock_levels")
_OUTAGE = _SYSTEM.format("redis_faults")
_NODES = _SYSTEM.format("node_faults")

LOCK_CASES: dict[str, tuple[str, ...]] = {
    "OP-21": (
        _SYSTEM.format("failpoints")
        + "test_a_node_may_die_at_any_step_and_every_occurrence_has_an_outcome",
    ),
    "OP-23": (
        _LOCKS
        + "RedisContract::test_holder_that_wakes_after_its_ttl_cannot_extend_the_next_one_s_lock",
        _FAILOVER
        + "test_primary_promoted_without_the_key_gives_the_lock_to_another_and_not_to_two",
        _CASES + "test_a_holder_that_wakes_after_its_ttl_does_not_extend_the_lock_of_the_next",
    ),
    "OP-25": (
        _CASES + "test_a_node_cut_off_from_redis_and_the_others_run_each_occurrence_once",
        _LEVELS + "test_a_holder_cut_off_from_the_quorum_is_told_before_its_lease_ends",
    ),
    "OP-27": (
        _NODES + "test_a_node_paused_past_its_lease_settles_its_lost_run_by_a_late_report",
        _LEVELS + "test_a_stopped_node_keeps_its_critical_lock_and_nobody_else_starts",
    ),
    "OP-29": (_CASES + "test_a_job_whose_lock_was_lost_succeeds_and_the_loss_is_noted_beside_it",),
    "OP-31": (
        _REDIS + "test_release_whose_reply_is_lost_still_releases",
        _REDIS + "test_release_that_failed_can_be_tried_again_with_the_same_lease",
        _CASES + "test_a_lock_whose_release_did_not_arrive_ends_by_its_ttl",
    ),
    "OP-33": (
        _REDIS + "test_renew_over_a_connection_that_was_cut_still_renews",
        _CASES + "test_a_renewal_whose_link_breaks_is_made_up_for_within_the_ttl",
    ),
    "OP-35": (_OUTAGE + "test_a_redis_that_forgets_its_locks_doubles_and_loses_nothing",),
    "OP-37": (
        _FAILOVER + "test_after_a_failover_any_node_can_lock_within_the_ttl",
        _LEVELS + "test_a_minority_that_dies_and_comes_back_empty_is_not_noticed",
        _LEVELS + "test_a_killed_node_s_critical_lock_ends_with_it",
    ),
    "OP-39": (_QUORUM + "TestVotes::test_lost_vote_leaves_no_key_and_the_next_try_wins",),
    "OP-41": (
        _REDIS + "test_redis_that_refuses_is_an_alarm_and_a_lost_race_is_none",
        _QUORUM + "TestMajority::test_refusal_is_no_loss",
        _CASES + "test_a_redis_that_refuses_writes_is_shown_and_the_database_decides",
    ),
    "OP-43": (_CASES + "test_a_node_that_comes_after_a_short_job_is_done_does_not_run_it_again",),
    "OP-45": (
        _SYSTEM.format("contention")
        + "test_ten_nodes_run_each_occurrence_once_and_losers_leave_the_database_alone",
        _SYSTEM.format("cases") + "test_four_nodes_on_sqlite_run_five_hundred_occurrences_once",
    ),
    "OP-47": (
        _CASES + "test_the_death_of_the_busiest_node_right_before_many_are_due_costs_none_of_them",
    ),
    "OP-85": (_OUTAGE + "test_without_redis_the_database_alone_decides_and_the_nodes_say_so",),
    "F3": (_OUTAGE + "test_a_redis_that_forgets_its_locks_doubles_and_loses_nothing",),
    "F4": (_CASES + "test_an_append_only_redis_that_is_killed_doubles_and_loses_nothing",),
    "F5": (_OUTAGE + "test_a_redis_that_forgets_its_locks_doubles_and_loses_nothing",),
    "F6": (_REDIS + "test_clearing_the_default_cache_frees_no_lock",),
    "F7": (_CASES + "test_a_redis_that_evicts_locks_doubles_and_loses_nothing",),
    "F8": (_CASES + "test_a_redis_that_refuses_writes_is_shown_and_the_database_decides",),
    "F9": (_OUTAGE + "test_without_redis_the_database_alone_decides_and_the_nodes_say_so",),
    "F10": (
        _CASES + "test_a_redis_that_is_slow_and_drops_links_doubles_and_loses_nothing",
        _CASES + "test_a_node_cut_off_from_redis_and_the_others_run_each_occurrence_once",
    ),
    "F11": (
        _REDIS + "test_script_flush_changes_nothing",
        _REDIS + "test_redis_that_loads_its_data_is_unavailable_and_then_keeps_the_locks",
    ),
    "F12": (_CASES + "test_a_planted_lock_without_ttl_delays_its_schedule_and_never_stops_it",),
    "F13": (_CASES + "test_steps_of_the_clock_of_redis_double_and_lose_nothing",),
    "F14": (_LEVELS + "test_a_minority_that_dies_and_comes_back_empty_is_not_noticed",),
    "F15": (_LEVELS + "test_without_a_majority_what_it_guards_waits_and_the_rest_goes_on",),
    "F16": (
        _LEVELS + "test_instances_that_forgot_a_lock_do_not_grant_it_again_within_its_ttl",
        _LEVELS + "test_a_minority_that_dies_and_comes_back_empty_is_not_noticed",
    ),
    "F17": (
        _FAILOVER + "test_after_a_failover_any_node_can_lock_within_the_ttl",
        _FAILOVER
        + "test_primary_promoted_without_the_key_gives_the_lock_to_another_and_not_to_two",
    ),
    "F32": (
        _LEVELS + "test_a_holder_whose_lock_session_ends_is_told_and_nobody_runs_beside_it",
        _LEVELS + "test_a_stopped_node_keeps_its_critical_lock_and_nobody_else_starts",
        _LEVELS + "test_a_stopped_node_that_wakes_after_another_got_its_lock_is_told",
    ),
    "F36": (_CASES + "test_nodes_whose_clocks_are_wrong_start_in_time_and_double_nothing",),
}
