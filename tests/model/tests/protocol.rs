//! The protocol as it is written: nothing goes wrong within these bounds. `make model` searches
//! larger ones.

#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "a test that meets the unexpected should fail"
)]

use rlock_model::{Setup, search};

/// Searches all that may happen within these bounds, and fails on the first violation.
#[track_caller]
fn holds_within(options: &str) {
    let setup = Setup::parse(options.split_whitespace()).unwrap();
    let report = search(&setup);
    println!(
        "{options}: {} states, {} steps",
        report.states, report.steps
    );
    if let Some(violation) = report.violations.first() {
        panic!("{options}: {violation}");
    }
    assert!(report.states > 1000, "nothing searched is nothing shown");
}

#[test]
fn connections_may_be_cut_while_calls_are_dropped() {
    holds_within("--calls=2 --cuts=2 --drops=1 --plain=1");
}

#[test]
fn leases_and_graces_may_end() {
    holds_within("--calls=1 --cuts=1 --plain=1 --ticks=3 --grace=2 --renews=1");
}

#[test]
fn a_server_may_restart_with_and_without_its_data() {
    holds_within("--calls=2 --restarts=1 --plain=1 --drops=1");
}

#[test]
fn a_replica_may_be_promoted_without_the_last_writes() {
    holds_within("--calls=1 --failovers=1 --plain=1 --binds=3");
}

#[test]
fn an_operator_may_break_a_lock() {
    holds_within("--calls=2 --cuts=1 --drops=1 --plain=1 --breaks=1");
}

#[test]
fn events_may_be_too_many_and_waits_may_time_out() {
    holds_within("--calls=1 --cuts=1 --plain=1 --overflows=1 --timeouts=1 --drops=1");
}

#[test]
fn two_owners_of_a_client_may_wait_for_each_other() {
    holds_within("--owners=2 --calls=2 --cuts=1 --drops=1");
}

#[test]
fn two_clients_may_wait_for_each_other() {
    holds_within("--clients=2 --faulty=1 --calls=2 --cuts=1 --drops=1");
}

#[test]
fn an_owner_may_read_and_write_while_connections_are_cut() {
    holds_within("--read_write=1 --calls=2 --cuts=1 --drops=1 --plain=1");
}

#[test]
fn readers_and_writers_enter_in_order() {
    holds_within("--read_write=1 --owners=2 --calls=3 --drops=1 --timeouts=1");
}

#[test]
fn an_acquire_may_get_an_error() {
    holds_within("--calls=2 --cuts=1 --drops=1 --plain=1 --errors=1");
}

#[test]
fn several_locks_are_all_or_none_while_one_of_them_is_broken() {
    holds_within("--names=2 --joint=1 --calls=1 --cuts=1 --breaks=1 --plain=1 --timeouts=1");
}

#[test]
fn waits_for_one_and_for_several_are_granted_in_order() {
    holds_within("--names=2 --joint=1 --owners=2 --calls=2 --plain=1 --drops=1");
}

#[test]
fn a_call_may_enter_a_hold_of_its_owner_again() {
    holds_within("--calls=3 --cuts=1 --plain=1 --reentry=1 --breaks=1");
}

#[test]
fn a_call_for_several_locks_may_enter_some_again() {
    holds_within("--names=2 --joint=1 --calls=2 --plain=1 --reentry=1 --breaks=1 --drops=1");
}

#[test]
fn a_slot_may_move_while_connections_are_cut() {
    holds_within("--nodes=2 --calls=1 --moves=1 --plain=1 --cuts=1 --drops=1 --renews=1");
}

#[test]
fn a_slot_may_move_away_and_come_back() {
    holds_within("--nodes=2 --calls=2 --moves=2 --plain=1 --drops=1");
}

#[test]
fn a_hold_that_has_moved_may_be_broken() {
    holds_within("--nodes=2 --calls=1 --moves=1 --breaks=1 --plain=1");
}
