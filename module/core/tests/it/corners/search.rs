//! The search for a deadlock.

use super::*;

/// A lock, and the owners that hold it.
type HoldersOf<'r> = (&'r [u8], &'r [Box<[u8]>]);

/// A caller asks for `x`, and each lock has the holders that are named. `released` is read for the
/// holds that the search itself ends. Returns the outcome.
fn asks_for_x<'r>(
    locks: &mut Locks,
    owner: &str,
    holders: &[HoldersOf<'r>],
    released: &'r Stored,
    budget: usize,
) -> Result<Outcome, CommandError> {
    let request = format!("x {owner} 1000 BLOCK 0");
    let request = Acquire::parse(words(&request)).unwrap();
    let mut turn = Turn::of(Command::Acquire(&request), 0, u32::MAX).with_budget(budget);
    let held = held_until(END);
    while let Some(task) = locks.next_task(&mut turn, NOW) {
        let read = match task.purpose {
            Purpose::Holders => {
                let name = name_of(&task);
                let of = holders.iter().find(|(lock, _)| *lock == &*name);
                Read::Owners(of.map_or(&[], |(_, holders)| holders))
            }
            Purpose::Release(_) => Read::One(released),
            _ => Read::One(&held),
        };
        locks.decide(&mut turn, task.found(read), NOW, &mut Vec::new());
    }
    turn.outcome()
}

fn may_wait(outcome: &Result<Outcome, CommandError>) -> bool {
    matches!(outcome, Ok(Outcome::MustWait { .. }))
}

fn owner(name: &str) -> Box<[u8]> {
    name.as_bytes().into()
}

/// Vic holds `x` and waits for `q`, until the search itself ends the hold there: then vic waits for
/// nobody, and not for bea, who stands behind vic and waits for amy.
#[test]
fn an_owner_that_is_granted_during_the_search_waits_for_nobody() {
    let (mut locks, _, tokens) = session_with(&[("q hank 1000 SESSION s", Stored::Free)]);
    waits(&mut locks, "q vic 1000 BLOCK 0", 1, &held_until(END));
    let held = [held_until(END), held_until(END)];
    waits_for_several(&mut locks, "bea 1000 2 q y BLOCK 0", 2, &held);
    let mut locks = ends(locks);
    let (vic, amy) = ([owner("vic")], [owner("amy")]);
    let holders: [HoldersOf<'_>; 3] = [(b"x", &vic), (b"q", &vic), (b"y", &amy)];
    let outcome = asks_for_x(&mut locks, "amy", &holders, &owned_by(tokens[0]), 1000);
    assert!(may_wait(&outcome), "{outcome:?}");
}

/// Others made a plain lock of the permits that amy waits for. One waits for permits alone, so the
/// wait of vic behind amy is no wait for amy.
#[test]
fn a_wait_for_permits_is_no_part_of_a_circle() {
    let mut locks = Locks::default();
    let no_room = Stored::Permits(PermitsHash {
        room: Room::At(END),
        ..permits(None, Some(END), END)
    });
    waits(&mut locks, "q amy 1000 PERMITS 1 BLOCK 0", 1, &no_room);
    waits(&mut locks, "q vic 1000 BLOCK 0", 2, &held_until(END));
    let (vic, zed) = ([owner("vic")], [owner("zed")]);
    let holders: [HoldersOf<'_>; 2] = [(b"x", &vic), (b"q", &zed)];
    let outcome = asks_for_x(&mut locks, "amy", &holders, &Stored::Free, 1000);
    assert!(may_wait(&outcome), "{outcome:?}");
}

/// Then there can be no circle, and nobody need know the holders.
#[test]
fn where_no_other_lock_is_waited_for_nothing_is_searched() {
    let (locks, _, _) = session_with(&[("x alice 1000 SESSION s", Stored::Free)]);
    let outcome = asks_for_x(&mut ends(locks), "bob", &[], &Stored::Free, 0);
    assert!(may_wait(&outcome), "{outcome:?}");
}

/// Many owners wait for the same locks, as guarantees.md says: each costs one look at each of them,
/// and not one for each other owner as well.
#[test]
fn many_owners_that_wait_for_the_same_locks_are_searched_at_a_look_each() {
    let mut locks = Locks::default();
    let names: Vec<String> = (0..1024).map(|number| format!(" k{number}")).collect();
    let held = vec![held_until(END); 1024];
    for handle in 0..60 {
        let wait = format!("o{handle} 1000 1024{} BLOCK 0", names.concat());
        waits_for_several(&mut locks, &wait, handle, &held);
    }
    let last = [owner("o59")];
    let outcome = asks_for_x(&mut locks, "amy", &[(b"x", &last)], &Stored::Free, 100_000);
    assert!(may_wait(&outcome), "{outcome:?}");
}

#[test]
fn a_search_ends_when_it_has_reached_too_many_owners_at_once() {
    for (number, is_found) in [(CHAIN_MAX, true), (CHAIN_MAX + 1, false)] {
        let mut locks = Locks::default();
        let names: Vec<String> = (0..number).map(|of| format!("o{of}")).collect();
        for (handle, name) in names.iter().enumerate() {
            let request = format!("z {name} 1000 BLOCK 0");
            waits(&mut locks, &request, handle, &held_until(END));
        }
        let all: Vec<_> = names.iter().map(|name| owner(name)).collect();
        let outcome = asks_for_x(&mut locks, "amy", &[(b"x", &all)], &Stored::Free, 1000);
        assert_eq!(may_wait(&outcome), is_found, "{outcome:?}");
    }
}
