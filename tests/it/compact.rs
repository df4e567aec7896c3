//! `rlock.replicate compact`: replicas and the append-only file come to the same as with plain
//! commands. What is tested of plain commands elsewhere is tested here once more.

use rlock_tests::{Conn, Feed, Pair, Random, Reply, Server, in_compact_form, in_sync, until};

/// The tests of another module, in the compact form.
macro_rules! again {
    ($module:ident { $($test:ident),* $(,)? }) => {
        mod $module {
            $(
                #[test]
                fn $test() {
                    super::in_compact_form(crate::$module::$test);
                }
            )*
        }
    };
}

again!(replication {
    acquire_is_the_hash_and_the_end_of_the_lease,
    a_reentry_is_the_new_count_and_the_new_end,
    a_release_is_the_new_count_or_the_deletion_with_the_message,
    a_renewal_is_the_new_end,
    a_hand_over_is_one_transaction,
    break_is_replicated_as_a_release,
    the_message_is_not_kept_for_a_replica_that_is_away,
    a_lease_that_ends_is_a_deletion_and_the_grant_in_this_order,
    a_users_deletion_comes_before_the_grant,
    in_a_clients_transaction_there_is_one_transaction,
    refused_and_read_only_commands_propagate_nothing,
    the_message_is_not_in_the_append_only_file,
    a_refused_command_disturbs_nobodys_watch,
    keyspace_notifications_are_those_of_the_plain_commands,
    an_expired_lock_is_notified_once,
    the_unlock_message_is_told_once_for_each_last_release_hand_over_and_break,
    the_channel_is_the_one_where_redisson_listens,
    subscribers_of_a_replica_are_told_too,
    publishing_follows_its_option,
    in_a_cluster_the_message_goes_to_both_kinds_of_subscribers_once,
    a_replica_refuses_to_write_and_answers_questions,
    a_replica_equals_its_primary_after_random_traffic_with_waiters,
    holds_survive_a_restart_with_their_ends_and_tokens_go_on_growing
});
again!(several_replication {
    a_replica_equals_its_primary_after_random_traffic,
    an_append_only_file_written_anew_holds_the_same,
    no_writer_is_inside_beside_anybody_and_all_get_their_turn
});
again!(failover {
    an_ordered_failover_keeps_the_holds_and_sends_the_waiters_away,
    sentinels_that_replace_a_dead_primary_keep_the_holds,
    what_a_deposed_primary_grants_has_smaller_tokens_than_its_successors_grants,
    a_failover_in_good_order_keeps_every_kind_of_hold
});
again!(permits {
    permits_reach_replicas_as_plain_commands,
});
again!(read_write {
    a_writers_token_is_unknown_after_a_restart_and_a_reentry_mints_one,
    replicas_are_told_plain_commands_with_absolute_times,
    a_replica_that_is_told_of_readers_and_a_writer_tells_the_same
});
again!(sessions {
    nothing_is_released_while_clients_are_paused,
    a_hand_over_by_the_end_of_a_session_is_one_transaction,
    a_hand_over_of_an_unfetched_grant_is_one_transaction,
    the_end_of_a_session_without_waiters_is_replicated_as_a_last_release,
    several_holds_that_end_together_are_whole_on_the_disk,
    sessions_and_waits_themselves_are_not_replicated,
    a_restart_leaves_holds_without_a_session
});
again!(several {
    all_or_none,
    replicas_are_told_all_in_one_transaction,
    refused_and_fruitless_commands_write_nothing_and_break_no_watch,
    an_mrelease_frees_all_before_anyone_is_granted
});
again!(kill {
    with_every_write_on_disk_a_kill_loses_nothing_that_was_acknowledged,
    with_everysec_a_kill_loses_only_the_end_of_the_history
});
again!(freed {
    a_failover_keeps_the_hold_and_ends_the_waits,
    nothing_is_written_while_writes_are_paused
});
again!(read_write_queue {
    nothing_is_written_while_clients_are_paused
});
