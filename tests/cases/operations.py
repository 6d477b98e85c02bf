"""Which tests show the operational cases, and the faults of locks and nodes.

A case is what public bug reports say goes wrong in schedulers of this kind (OP) or a fault
that tests make on purpose (F). The docstring of each test begins with its cases.
"""

from __future__ import annotations

__all__ = ["CASES"]

_UNIT = "tests/unit/test_{}.py::"
_INTEGRATION = "tests/integration/test_{}.py::"
_CONTRACTS = "tests/contracts/test_{}.py::"
_SYSTEM = "tests/system/test_{}.py::"
_LOCKS = _CONTRACTS.format("locks")
_REDIS = _CONTRACTS.format("redis_faults")
_FAILOVER = _CONTRACTS.format("failover")
_QUORUM = _CONTRACTS.format("redlock_faults")
_GATE = _SYSTEM.format("lock_cases")
_CASES = _SYSTEM.format("cases")
_LEVELS = _SYSTEM.format("lock_levels")
_OUTAGE = _SYSTEM.format("redis_faults")
_NODES = _SYSTEM.format("node_faults")
_TIMES = _SYSTEM.format("time_settings")
_SCALE = _SYSTEM.format("scale")
_STORM = (
    _SYSTEM.format("storm")
    + "test_a_storm_of_kills_doubles_nothing_and_accounts_for_every_occurrence"
)
_EDIT = _INTEGRATION.format("schedule_edit")
_PAST = _INTEGRATION.format("past_instants")
_BAD = _INTEGRATION.format("bad_rows")
_PLAN = _UNIT.format("timetable_plan")
_RUNNER = _UNIT.format("runner")
_CAPTURE = _UNIT.format("capture")

CASES: dict[str, tuple[str, ...]] = {
    "OP-01": (_EDIT + "test_op_01_a_new_time_does_not_rerun_the_day",),
    "OP-03": (_EDIT + "test_op_03_an_edit_brings_no_instant_of_neither_rule",),
    "OP-05": (
        _EDIT + "test_op_05_a_new_zone_decides_alone_from_the_edit_on",
        _EDIT + "test_op_05_list_page_and_form_show_the_instant_of_the_runner",
    ),
    "OP-07": (
        _EDIT + "test_op_07_every_way_to_resume_goes_on_with_the_next_slot",
        _PAST + "test_after_days_of_pause_the_next_instant_runs_and_none_before_it",
    ),
    "OP-09": (
        _EDIT + "test_op_09_a_claim_that_was_planned_before_the_pause_gets_nothing",
        _EDIT + "test_op_09_a_claim_that_was_planned_before_an_edit_gets_nothing",
        _SYSTEM.format("pauses") + "test_a_pause_ends_by_itself_and_none_of_its_instants_runs",
    ),
    "OP-11": (_EDIT + "test_op_11_a_new_schedule_has_the_project_s_zone",),
    "OP-13": (_PAST + "test_after_days_of_pause_the_next_instant_runs_and_none_before_it",),
    "OP-15": (_PLAN + "test_ticks_that_come_early_and_late_plan_every_slot_once",),
    "OP-17": (_PAST + "test_a_new_schedule_reruns_nobody_within_the_grace",),
    "OP-19": (
        _PAST + "test_a_node_that_starts_runs_nothing_that_is_past",
        _CASES + "test_restarts_run_nothing_again",
    ),
    "OP-21": (
        _STORM,
        _SYSTEM.format("failpoints")
        + "test_a_node_may_die_at_any_step_and_every_occurrence_has_an_outcome",
    ),
    "OP-23": (
        _LOCKS
        + "RedisContract::test_holder_that_wakes_after_its_ttl_cannot_extend_the_next_one_s_lock",
        _FAILOVER
        + "test_primary_promoted_without_the_key_gives_the_lock_to_another_and_not_to_two",
        _GATE + "test_a_holder_that_wakes_after_its_ttl_does_not_extend_the_lock_of_the_next",
    ),
    "OP-25": (
        _GATE + "test_a_node_cut_off_from_redis_and_the_others_run_each_occurrence_once",
        _LEVELS + "test_a_holder_cut_off_from_the_quorum_is_told_before_its_lease_ends",
    ),
    "OP-27": (
        _NODES + "test_a_node_paused_past_its_lease_settles_its_lost_run_by_a_late_report",
        _LEVELS + "test_a_stopped_node_keeps_its_critical_lock_and_nobody_else_starts",
    ),
    "OP-29": (_GATE + "test_a_job_whose_lock_was_lost_succeeds_and_the_loss_is_noted_beside_it",),
    "OP-31": (
        _REDIS + "test_release_whose_reply_is_lost_still_releases",
        _REDIS + "test_release_that_failed_can_be_tried_again_with_the_same_lease",
        _GATE + "test_a_lock_whose_release_did_not_arrive_ends_by_its_ttl",
    ),
    "OP-33": (
        _REDIS + "test_renew_over_a_connection_that_was_cut_still_renews",
        _GATE + "test_a_renewal_whose_link_breaks_is_made_up_for_within_the_ttl",
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
        _GATE + "test_a_redis_that_refuses_writes_is_shown_and_the_database_decides",
    ),
    "OP-43": (
        _GATE + "test_a_node_that_comes_after_a_short_job_is_done_does_not_run_it_again",
        _GATE + "test_either_guard_of_a_claim_alone_refuses_a_node_that_comes_late",
        _GATE + "test_without_both_guards_a_node_that_comes_late_runs_an_occurrence_again",
    ),
    "OP-45": (
        _SYSTEM.format("contention")
        + "test_ten_nodes_run_each_occurrence_once_and_losers_leave_the_database_alone",
        _CASES + "test_four_nodes_on_sqlite_run_five_hundred_occurrences_once",
    ),
    "OP-47": (
        _GATE + "test_the_death_of_the_busiest_node_right_before_many_are_due_costs_none_of_them",
    ),
    "OP-50": (
        _NODES + "test_a_node_that_comes_back_at_once_under_its_old_name_is_another_one",
        _STORM,
    ),
    "OP-52": (
        _SYSTEM.format("postgres_faults") + "test_commits_whose_answer_is_lost_are_read_back",
        _INTEGRATION.format("schedulerctl_looking")
        + "TestStatus::test_no_node_overdue_and_lost_are_problems",
    ),
    "OP-54": (_GATE + "test_nodes_whose_clocks_are_wrong_start_in_time_and_double_nothing",),
    "OP-55": (_CASES + "test_connections_dropped_while_idle_and_during_a_job_cost_nothing",),
    "OP-57": (_CASES + "test_four_nodes_on_sqlite_run_five_hundred_occurrences_once",),
    "OP-59": (
        _EDIT + "test_op_59_an_edit_survives_a_tick_that_passes_meanwhile",
        _EDIT + "test_op_59_a_tick_that_passes_meanwhile_survives_an_edit_of_the_notes",
        _EDIT + "test_op_59_a_stale_form_is_refused_and_names_both_values",
    ),
    "OP-62": (_TIMES + "test_a_node_west_of_greenwich_plans_the_near_future_and_idles",),
    "OP-64": (_TIMES + "test_each_minute_runs_once_at_its_own_instant_however_late_it_starts",),
    "OP-66": (_TIMES + "test_each_minute_runs_once_at_its_own_instant_however_late_it_starts",),
    "OP-68": (
        _PLAN + "test_a_clock_that_steps_over_a_slot_or_back_before_it_runs_it_once",
        _GATE + "test_nodes_whose_clocks_are_wrong_start_in_time_and_double_nothing",
    ),
    "OP-70": (
        _BAD + "test_rows_that_cannot_run_say_why_and_those_among_them_run",
        _BAD + "test_what_no_column_can_hold_is_refused_by_the_database",
        _BAD + "test_an_odd_row_is_planned_as_it_says",
        _BAD + "test_rows_that_went_bad_after_they_were_planned_stop_no_tick",
        _BAD + "test_a_check_that_is_broken_itself_stops_nobody_and_its_runs_will_say_so",
        _EDIT + "test_op_70_bad_rows_are_shown_as_invalid_and_good_ones_go_on",
        _CASES + "test_bad_rows_are_marked_and_the_good_ones_among_them_run",
    ),
    "OP-72": (_CASES + "test_a_finished_and_a_paused_schedule_at_the_head_block_nobody",),
    "OP-74": (
        _CASES + "test_a_name_and_arguments_beyond_the_basic_plane_run_like_others",
        _INTEGRATION.format("wide_text")
        + "test_wide_text_is_kept_by_every_column_and_shown_on_every_page",
    ),
    "OP-76": (
        _RUNNER + "test_message_of_five_megabytes_is_cut_in_the_traceback",
        _RUNNER + "test_deep_recursion_keeps_the_innermost_frames",
        _RUNNER + "test_huge_traceback_costs_less_than_50_megabytes",
        _RUNNER + "test_huge_result_is_kept_as_a_short_repr",
        _CAPTURE + "test_cut_output_keeps_both_ends_and_counts_the_rest",
        _CAPTURE + "test_resident_memory_stays_flat_for_fifty_megabytes_of_print",
    ),
    "OP-79": (_SCALE + "test_pages_of_a_long_history_answer_quickly",),
    "OP-81": (_SCALE + "test_memory_does_not_grow_with_ticks_rules_or_failures",),
    "OP-83": (
        _SCALE
        + "test_schedules_that_are_due_at_the_same_instant_neither_exclude_nor_starve_each_other",
    ),
    "OP-85": (_OUTAGE + "test_without_redis_the_database_alone_decides_and_the_nodes_say_so",),
    "OP-88": (
        _SYSTEM.format("shutdown")
        + "test_a_signal_to_the_whole_process_group_lets_the_running_job_finish",
    ),
    "F3": (_OUTAGE + "test_a_redis_that_forgets_its_locks_doubles_and_loses_nothing",),
    "F4": (_GATE + "test_an_append_only_redis_that_is_killed_doubles_and_loses_nothing",),
    "F5": (_OUTAGE + "test_a_redis_that_forgets_its_locks_doubles_and_loses_nothing",),
    "F6": (_REDIS + "test_clearing_the_default_cache_frees_no_lock",),
    "F7": (_GATE + "test_a_redis_that_evicts_locks_doubles_and_loses_nothing",),
    "F8": (_GATE + "test_a_redis_that_refuses_writes_is_shown_and_the_database_decides",),
    "F9": (_OUTAGE + "test_without_redis_the_database_alone_decides_and_the_nodes_say_so",),
    "F10": (
        _GATE + "test_a_redis_that_is_slow_and_drops_links_doubles_and_loses_nothing",
        _GATE + "test_a_node_cut_off_from_redis_and_the_others_run_each_occurrence_once",
    ),
    "F11": (
        _REDIS + "test_script_flush_changes_nothing",
        _REDIS + "test_redis_that_loads_its_data_is_unavailable_and_then_keeps_the_locks",
    ),
    "F12": (_GATE + "test_a_planted_lock_without_ttl_delays_its_schedule_and_never_stops_it",),
    "F13": (_GATE + "test_steps_of_the_clock_of_redis_double_and_lose_nothing",),
    "F14": (_LEVELS + "test_a_minority_that_dies_and_comes_back_empty_is_not_noticed",),
    "F15": (_LEVELS + "test_without_a_majority_what_it_guards_waits_and_the_rest_goes_on",),
    "F16": (
        _LEVELS + "test_instances_that_forgot_a_lock_do_not_grant_it_again_within_its_ttl",
        _LEVELS + "test_a_minority_that_dies_and_comes_back_empty_is_not_noticed",
    ),
    "F17": (
        _SYSTEM.format("failover") + "test_a_failover_under_load_doubles_and_loses_nothing",
        _FAILOVER + "test_after_a_failover_any_node_can_lock_within_the_ttl",
        _FAILOVER
        + "test_primary_promoted_without_the_key_gives_the_lock_to_another_and_not_to_two",
    ),
    "F19": (_STORM,),
    "F21": (
        _NODES
        + "test_a_paused_parent_whose_workers_go_on_is_taken_for_dead_and_starts_nothing_more",
    ),
    "F32": (
        _LEVELS + "test_a_holder_whose_lock_session_ends_is_told_and_nobody_runs_beside_it",
        _LEVELS + "test_a_stopped_node_keeps_its_critical_lock_and_nobody_else_starts",
        _LEVELS + "test_a_stopped_node_that_wakes_after_another_got_its_lock_is_told",
    ),
    "F36": (_GATE + "test_nodes_whose_clocks_are_wrong_start_in_time_and_double_nothing",),
    "F45": (_GATE + "test_late_claims_of_what_was_pruned_meanwhile_are_refused",),
}
