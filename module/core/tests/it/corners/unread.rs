//! Keys that cannot be read, or that another node serves.

use super::*;

#[test]
fn a_command_at_a_key_that_cannot_be_read_is_refused_but_a_wait_can_be_cancelled() {
    let run = |locks: &mut Locks, command| {
        let mut turn = Turn::of(command, 0, 10);
        while let Some(task) = locks.next_task(&mut turn, NOW) {
            locks.decide(&mut turn, task.found(Read::Unknown), NOW, &mut Vec::new());
        }
        turn.outcome()
    };
    let mut locks = Locks::default();
    waits(&mut locks, "k bob 1000 BLOCK 0", 1, &held_until(END));
    let renew = Renew::parse(words("k alice 1000")).unwrap();
    let refused = run(&mut locks, Command::Renew(&renew));
    assert_eq!(refused.unwrap_err(), CommandError::SlotOnItsWay);
    let cancel = Cancel::parse(words("k bob")).unwrap();
    let left = run(&mut locks, Command::Cancel(&cancel));
    assert!(matches!(left, Ok(Outcome::Number(1))), "{left:?}");
    assert_eq!(locks.gauges().waiters, 0);
}

#[test]
fn a_hold_whose_key_cannot_be_read_is_looked_at_again_after_a_second() {
    let (mut locks, _) = asked();
    locks.changed(at(b"k"));
    let (purposes, _) = fires(&mut locks, NOW, |_| Read::Unknown);
    assert_eq!(purposes, [Purpose::CheckHold(Mode::Plain)]);
    assert_eq!(locks.next_deadline(NOW), Some(1000));
}

#[test]
fn waiters_of_a_key_that_another_node_serves_are_sent_there() {
    let mut locks = Locks::default();
    waits(&mut locks, "k bob 1000 BLOCK 0", 1, &held_until(END));
    locks.changed(at(b"k"));
    let elsewhere = Read::Elsewhere(CommandError::SlotOnItsWay);
    let (_, effects) = fires(&mut locks, NOW, |_| elsewhere.clone());
    assert_eq!(refused(&effects), [1]);
}

/// The next look at the queue of that lock tells the waiters where to go.
#[test]
fn a_wait_for_several_of_which_one_is_elsewhere_looks_at_that_one() {
    let mut locks = Locks::default();
    let both = [Stored::Free, held_until(END)];
    waits_for_several(&mut locks, "bob 1000 2 a b BLOCK 0", 1, &both);
    locks.changed(at(b"b"));
    let elsewhere = Read::Elsewhere(CommandError::SlotOnItsWay);
    let (purposes, effects) = fires(&mut locks, NOW, |task| match task.purpose {
        Purpose::GrantSeveral(_) => Read::NotHere(0),
        _ if name_of(task) == b"a" => elsewhere.clone(),
        _ => Read::One(&Stored::Free),
    });
    assert_eq!(refused(&effects), [1], "{purposes:?}");
}
