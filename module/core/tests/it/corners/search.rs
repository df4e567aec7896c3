//! The search for a deadlock.

use super::queues::read_write;
use super::*;

/// A lock, and the owners that hold it.
type HoldersOf<'r> = (&'r [u8], &'r [Box<[u8]>]);

/// A caller asks for `x`, which is held. Each lock has the holders that are named; `stored` is what
/// a task reads that comes before the question for them. Returns the outcome.
fn asks_for_x<'r>(
    locks: &mut Locks,
    owner: &str,
    holders: &[HoldersOf<'r>],
    stored: impl Fn(Purpose) -> &'r Stored,
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
            Purpose::Command => Read::One(&held),
            due => Read::One(stored(due)),
        };
        locks.decide(&mut turn, task.found(read), NOW, &mut Vec::new());
    }
    turn.outcome()
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
    let both = MultiAcquire::parse(words("bea 1000 2 q y BLOCK 0")).unwrap();
    let held = [held_until(END), held_until(END)];
    begin(
        &mut locks,
        Command::MultiAcquire(&both),
        2,
        &Read::Several(&held),
    );
    let mut locks = ends(locks);
    let (vic, amy) = ([owner("vic")], [owner("amy")]);
    let holders: [HoldersOf<'_>; 3] = [(b"x", &vic), (b"q", &vic), (b"y", &amy)];
    let own = owned_by(tokens[0]);
    let outcome = asks_for_x(&mut locks, "amy", &holders, |_| &own, 1000);
    assert!(
        matches!(outcome, Ok(Outcome::MustWait { .. })),
        "{outcome:?}"
    );
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
    let outcome = asks_for_x(&mut locks, "amy", &holders, |_| &Stored::Free, 1000);
    assert!(
        matches!(outcome, Ok(Outcome::MustWait { .. })),
        "{outcome:?}"
    );
}

/// Then there can be no circle, and nobody need know the holders.
#[test]
fn where_no_other_lock_is_waited_for_nothing_is_searched() {
    let (locks, _, _) = session_with(&[("x alice 1000 SESSION s", Stored::Free)]);
    let outcome = asks_for_x(&mut ends(locks), "bob", &[], |_| &Stored::Free, 0);
    assert!(
        matches!(outcome, Ok(Outcome::MustWait { .. })),
        "{outcome:?}"
    );
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
        let wait = MultiAcquire::parse(words(&wait)).unwrap();
        let read = Read::Several(&held);
        begin(&mut locks, Command::MultiAcquire(&wait), handle, &read);
    }
    let last = [owner("o59")];
    let outcome = asks_for_x(
        &mut locks,
        "amy",
        &[(b"x", &last)],
        |_| &Stored::Free,
        100_000,
    );
    assert!(
        matches!(outcome, Ok(Outcome::MustWait { .. })),
        "{outcome:?}"
    );
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
        let outcome = asks_for_x(&mut locks, "amy", &[(b"x", &all)], |_| &Stored::Free, 1000);
        let may_wait = matches!(outcome, Ok(Outcome::MustWait { .. }));
        assert_eq!(may_wait, is_found, "{outcome:?}");
    }
}

/// Wes writes and reads `q`, and waits for amy. The search itself ends the writing, so vic may
/// read.
#[test]
fn a_reader_that_the_search_lets_in_waits_for_nobody() {
    let (mut locks, _, tokens) = session_with(&[("q wes 1000 WRITE SESSION s", Stored::Free)]);
    let others_write = ReadWrite {
        others_write: true,
        ..read_write(None, None, END)
    };
    let others_write = Stored::ReadWrite(others_write);
    waits(&mut locks, "q vic 1000 READ BLOCK 0", 1, &others_write);
    waits(&mut locks, "y wes 1000 BLOCK 0", 2, &held_until(END));
    let mut locks = ends(locks);
    let hold = rlock_core::WriteHold {
        count: Count::Valid(1),
        token: Some(tokens[0]),
    };
    let of_wes = Stored::ReadWrite(ReadWrite {
        own_write: Some(hold),
        ..read_write(Some(END), None, END)
    });
    let for_vic = Stored::ReadWrite(read_write(None, Some(END), END));
    let (vic, wes, amy) = ([owner("vic")], [owner("wes")], [owner("amy")]);
    let holders: [HoldersOf<'_>; 3] = [(b"x", &vic), (b"q", &wes), (b"y", &amy)];
    let stored = |due| match due {
        Purpose::Release(_) => &of_wes,
        _ => &for_vic,
    };
    let outcome = asks_for_x(&mut locks, "amy", &holders, stored, 1000);
    assert!(
        matches!(outcome, Ok(Outcome::MustWait { .. })),
        "{outcome:?}"
    );
}

/// Rob reads `q` and waits for amy. Wes waited to write `q` and has left, so vic may read.
#[test]
fn a_reader_whose_writer_has_left_waits_for_nobody() {
    let mut locks = Locks::default();
    let robs = Stored::ReadWrite(read_write(None, Some(END), END));
    waits(&mut locks, "q wes 1000 WRITE BLOCK 0", 1, &robs);
    waits(&mut locks, "q vic 1000 READ BLOCK 0", 2, &robs);
    waits(&mut locks, "y rob 1000 BLOCK 0", 3, &held_until(END));
    let cancel = Cancel::parse(words("q wes")).unwrap();
    decide(&mut locks, Command::Cancel(&cancel), &[robs]);
    let (vic, rob, amy) = ([owner("vic")], [owner("rob")], [owner("amy")]);
    let holders: [HoldersOf<'_>; 3] = [(b"x", &vic), (b"q", &rob), (b"y", &amy)];
    let outcome = asks_for_x(&mut locks, "amy", &holders, |_| &robs, 1000);
    assert!(
        matches!(outcome, Ok(Outcome::MustWait { .. })),
        "{outcome:?}"
    );
}

/// Another module asks for `z` in vic's name.
fn vic_waits_for_z(locks: &mut Locks) {
    let amy = [owner("amy")];
    let wait = Acquire::parse(words("z vic 1000 BLOCK 0")).unwrap();
    let (mut turn, mut effects) = (Turn::of(Command::Acquire(&wait), 0, 10), Vec::new());
    let (held, both) = (held_until(END), [Stored::Free, Stored::Free]);
    while let Some(task) = locks.next_task(&mut turn, NOW) {
        let read = match task.purpose {
            Purpose::Holders if name_of(&task) == b"z" => Read::Owners(&amy),
            Purpose::Holders => Read::Owners(&[]),
            Purpose::GrantSeveral(_) => Read::Several(&both),
            _ => Read::One(&held),
        };
        locks.decide(&mut turn, task.found(read), NOW, &mut effects);
    }
    let client = BlockedClient {
        handle: 3,
        client_id: 5,
    };
    let joined = locks.enqueue(&mut turn, Some(client), NOW, &mut effects);
    assert!(joined.is_some(), "{:?}", turn.outcome());
}

/// Hank's hold of `q` ends while amy, who holds `z`, asks for `x`, which vic holds. Another module
/// hears of a key that expires while one is read, or of one that is written: then vic begins to
/// wait for amy.
#[test]
fn a_wait_that_another_module_begins_within_the_turn_closes_no_circle() {
    let (vic, amy) = ([owner("vic")], [owner("amy")]);
    let (held, both) = (held_until(END), [Stored::Free, Stored::Free]);
    for while_read in [false, true] {
        let (mut locks, _, tokens) = session_with(&[("q hank 1000 SESSION s", Stored::Free)]);
        let several = MultiAcquire::parse(words("mia 1000 2 q r BLOCK 0")).unwrap();
        let read = [held, Stored::Free];
        begin(
            &mut locks,
            Command::MultiAcquire(&several),
            1,
            &Read::Several(&read),
        );
        waits(&mut locks, "q vic 1000 BLOCK 0", 2, &held);
        let (mut locks, own) = (ends(locks), owned_by(tokens[0]));
        let wait = Acquire::parse(words("x amy 1000 BLOCK 0")).unwrap();
        let (mut turn, mut effects) = (Turn::of(Command::Acquire(&wait), 0, 10), Vec::new());
        let mut others_come = 1;
        while let Some(task) = locks.next_task(&mut turn, NOW) {
            let read = match task.purpose {
                Purpose::Holders => match &*name_of(&task) {
                    b"x" => Read::Owners(&vic),
                    b"z" => Read::Owners(&amy),
                    _ => Read::Owners(&[]),
                },
                Purpose::Release(_) => Read::One(&own),
                Purpose::GrantSeveral(_) => Read::Several(&both),
                _ => Read::One(&held),
            };
            let is_now = match task.purpose {
                Purpose::GrantSeveral(_) => while_read,
                Purpose::Release(_) => !while_read,
                _ => false,
            };
            if is_now && while_read && others_come > 0 {
                others_come = 0;
                vic_waits_for_z(&mut locks);
            }
            locks.decide(&mut turn, task.found(read), NOW, &mut effects);
            if is_now && !while_read && others_come > 0 {
                others_come = 0;
                vic_waits_for_z(&mut locks);
            }
        }
        assert_eq!(others_come, 0);
        let outcome = turn.outcome();
        assert!(
            matches!(outcome, Err(CommandError::Deadlock(_))),
            "{while_read}: {outcome:?}"
        );
    }
}
