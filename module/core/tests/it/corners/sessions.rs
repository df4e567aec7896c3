//! Sessions, and the clock.

use super::*;

/// While it is woken to hear the events, they may be too many.
#[test]
fn a_listener_that_was_woken_and_went_has_left_its_events_unheard() {
    let holds: Vec<String> = (0..11)
        .map(|number| format!("k{number} alice 1000 SESSION s"))
        .collect();
    let holds: Vec<_> = holds.iter().map(|of| (of.as_str(), Stored::Free)).collect();
    let (mut locks, session, _) = session_with(&holds);
    locks.listen(session, 1, Wait::from_ms(0).unwrap(), NOW);
    for number in 0..11 {
        locks.changed(at(format!("k{number}").as_bytes()));
    }
    let (_, effects) = fires(&mut locks, NOW, |_| Read::One(&Stored::Free));
    assert_eq!(effects, [Effect::Wake(1)]);
    assert_eq!(locks.counters().sessions_overflowed, 0);
    locks.woken_no_more(session);
    assert_eq!(locks.next_deadline(NOW), Some(0));
    locks.passed(NOW, &mut Vec::new());
    assert_eq!(locks.counters().sessions_overflowed, 1);
}

/// The clock is read where something waits for it: a waiter, or the end of a delay.
#[test]
fn a_server_that_waits_for_nothing_reads_no_clock() {
    let mut locks = Locks::default();
    assert!(locks.is_quiet() && !locks.is_timed());
    let (holds, _) = asked();
    assert!(!holds.is_quiet() && !holds.is_timed());
    waits(&mut locks, "k bob 1000 BLOCK 0", 1, &held_until(END));
    assert!(!locks.is_quiet() && locks.is_timed());
    let mut delayed = Locks::default();
    delayed.start_grant_delay(NOW, 50);
    assert!(delayed.is_timed());
    // The delay keeps nobody back.
    assert_eq!(delayed.next_deadline(NOW), None);
}
