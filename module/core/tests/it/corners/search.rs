//! The search for a deadlock.

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
    let own = owned_by(tokens[0]);
    let outcome = asks_for_x(&mut locks, "amy", &holders, |_| &own, 1000);
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
    let outcome = asks_for_x(&mut locks, "amy", &holders, |_| &Stored::Free, 1000);
    assert!(may_wait(&outcome), "{outcome:?}");
}

/// Then there can be no circle, and nobody need know the holders.
#[test]
fn where_no_other_lock_is_waited_for_nothing_is_searched() {
    let (locks, _, _) = session_with(&[("x alice 1000 SESSION s", Stored::Free)]);
    let outcome = asks_for_x(&mut ends(locks), "bob", &[], |_| &Stored::Free, 0);
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
    let outcome = asks_for_x(
        &mut locks,
        "amy",
        &[(b"x", &last)],
        |_| &Stored::Free,
        100_000,
    );
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
        let outcome = asks_for_x(&mut locks, "amy", &[(b"x", &all)], |_| &Stored::Free, 1000);
        assert_eq!(may_wait(&outcome), is_found, "{outcome:?}");
    }
}

/// Wes writes and reads `q`, and waits for amy; vic waits to read `q`. The writing is to be ended.
/// Returns what is stored, for each task.
fn a_writer_becomes_a_reader() -> (Locks, impl Fn(Purpose) -> Stored) {
    let (mut locks, _, tokens) = session_with(&[("q wes 1000 WRITE SESSION s", Stored::Free)]);
    let others_write = ReadWrite {
        others_write: true,
        ..read_write(None, None, END)
    };
    let others_write = Stored::ReadWrite(others_write);
    waits(&mut locks, "q vic 1000 READ BLOCK 0", 1, &others_write);
    waits(&mut locks, "y wes 1000 BLOCK 0", 2, &held_until(END));
    let of_wes = ReadWrite {
        own_write: Some(rlock_core::WriteHold {
            count: Count::Valid(1),
            token: Some(tokens[0]),
        }),
        ..read_write(Some(END), None, END)
    };
    let for_vic = read_write(None, Some(END), END);
    let stored = move |due| match due {
        Purpose::Release(_) => Stored::ReadWrite(of_wes),
        _ => Stored::ReadWrite(for_vic),
    };
    (ends(locks), stored)
}

/// Where there is no time to end the writing, nothing is said of a circle.
#[test]
fn a_reader_that_the_search_lets_in_waits_for_nobody() {
    let (vic, wes, amy) = ([owner("vic")], [owner("wes")], [owner("amy")]);
    let holders: [HoldersOf<'_>; 3] = [(b"x", &vic), (b"q", &wes), (b"y", &amy)];
    for budget in [1000, 1, 0] {
        let (mut locks, stored) = a_writer_becomes_a_reader();
        let (write, read) = (
            stored(Purpose::Release(Mode::Write)),
            stored(Purpose::Holders),
        );
        let stored = |due| match due {
            Purpose::Release(_) => &write,
            _ => &read,
        };
        let outcome = asks_for_x(&mut locks, "amy", &holders, stored, budget);
        let is_right = match budget {
            1000 => may_wait(&outcome),
            _ => matches!(outcome, Err(CommandError::ChainTooLong)),
        };
        assert!(is_right, "{budget}: {outcome:?}");
    }
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
    assert!(may_wait(&outcome), "{outcome:?}");
}

/// A hold of `q` whose lease is over is ended when the search reads it. Vic, who holds `x`, is let
/// in, and not taken for one behind bea, who waits for amy.
#[test]
fn a_hold_that_expires_while_it_is_read_keeps_nobody_waiting() {
    let mut locks = Locks::default();
    waits(&mut locks, "q vic 1000 BLOCK 0", 1, &held_until(END));
    let held = [held_until(END), held_until(END)];
    waits_for_several(&mut locks, "bea 1000 2 q y BLOCK 0", 2, &held);
    waits(&mut locks, "y wes 1000 BLOCK 0", 3, &held_until(END));
    let (vic, wes, amy) = ([owner("vic")], [owner("wes")], [owner("amy")]);
    let request = Acquire::parse(words("x amy 1000 BLOCK 0")).unwrap();
    let mut turn = Turn::of(Command::Acquire(&request), 0, u32::MAX);
    let (held, mut is_told) = (held_until(END), false);
    while let Some(task) = locks.next_task(&mut turn, NOW) {
        let read = match task.purpose {
            Purpose::Holders => match &*name_of(&task) {
                b"q" if !is_told => {
                    is_told = true;
                    locks.changed(LockRef { db: 0, name: b"q" });
                    Read::Owners(&wes)
                }
                b"q" | b"x" => Read::Owners(&vic),
                _ => Read::Owners(&amy),
            },
            Purpose::Reconcile(_) => Read::One(&Stored::Free),
            _ => Read::One(&held),
        };
        locks.decide(&mut turn, task.found(read), NOW, &mut Vec::new());
    }
    let outcome = turn.outcome();
    assert!(is_told && may_wait(&outcome), "{outcome:?}");
}

/// Another module asks for a lock in an owner's name, which amy holds, and waits.
fn another_module_waits(locks: &mut Locks, request: &str) {
    let amy = [owner("amy")];
    let wait = Acquire::parse(words(request)).unwrap();
    let (mut turn, mut effects) = (Turn::of(Command::Acquire(&wait), 0, u32::MAX), Vec::new());
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

/// What the server does with the keys of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    Reads,
    Writes,
}

/// Hank's hold of `q` ends while amy, who holds `z`, asks for `x`, which vic holds. Another module
/// hears of the keys that are read and written meanwhile. Hal holds `q` next, and may wait for amy.
/// Returns the outcome, and how many deadlocks were refused.
fn amy_waits_while(
    hal_waits: bool,
    mut another_module: impl FnMut(&mut Locks, Purpose, Does),
) -> (Result<Outcome, CommandError>, u64) {
    let (vic, amy, hal) = ([owner("vic")], [owner("amy")], [owner("hal")]);
    let (held, both) = (held_until(END), [Stored::Free, Stored::Free]);
    let (mut locks, _, tokens) = session_with(&[("q hank 1000 SESSION s", Stored::Free)]);
    let several = "mia 1000 2 q r BLOCK 0";
    waits_for_several(&mut locks, several, 1, &[held, Stored::Free]);
    waits(&mut locks, "q vic 1000 BLOCK 0", 2, &held);
    if hal_waits {
        waits(&mut locks, "z hal 1000 BLOCK 0", 4, &held);
    }
    let (mut locks, own) = (ends(locks), owned_by(tokens[0]));
    let wait = Acquire::parse(words("x amy 1000 BLOCK 0")).unwrap();
    let (mut turn, mut effects) = (Turn::of(Command::Acquire(&wait), 0, 10), Vec::new());
    while let Some(task) = locks.next_task(&mut turn, NOW) {
        let read = match task.purpose {
            Purpose::Holders => match &*name_of(&task) {
                b"x" => Read::Owners(&vic),
                b"z" => Read::Owners(&amy),
                _ => Read::Owners(&hal),
            },
            Purpose::Release(_) => Read::One(&own),
            Purpose::GrantSeveral(_) => Read::Several(&both),
            _ => Read::One(&held),
        };
        another_module(&mut locks, task.purpose, Does::Reads);
        locks.decide(&mut turn, task.found(read), NOW, &mut effects);
        another_module(&mut locks, task.purpose, Does::Writes);
    }
    (turn.outcome(), locks.counters().deadlocks_refused)
}

/// Another module asks this, once: while the hold's end is written, or while it is read for a grant
/// that this makes possible.
fn amy_waits_while_another_module(asks: &str, when: Does) -> Result<Outcome, CommandError> {
    let mut asks = Some(asks);
    let (outcome, _) = amy_waits_while(false, |locks, purpose, does| {
        let is_now = match purpose {
            Purpose::Release(_) => Does::Writes,
            Purpose::GrantSeveral(_) => Does::Reads,
            _ => return,
        };
        if does == when
            && is_now == when
            && let Some(asks) = asks.take()
        {
            another_module_waits(locks, asks);
        }
    });
    assert_eq!(asks, None, "the other module was not asked");
    outcome
}

#[test]
fn a_wait_that_another_module_begins_within_the_turn_closes_no_circle() {
    for when in [Does::Writes, Does::Reads] {
        let outcome = amy_waits_while_another_module("z vic 1000 BLOCK 0", when);
        let is_refused = matches!(outcome, Err(CommandError::Deadlock(_)));
        assert!(is_refused, "{when:?}: {outcome:?}");
    }
}

#[test]
fn an_owner_that_another_module_queues_within_the_turn_waits_once() {
    for when in [Does::Writes, Does::Reads] {
        let outcome = amy_waits_while_another_module("x amy 1000 BLOCK 0", when);
        let is_refused = matches!(outcome, Err(CommandError::Waiting));
        assert!(is_refused, "{when:?}: {outcome:?}");
    }
}

#[test]
fn a_wait_that_was_refused_is_not_decided_again() {
    let mut is_asked = false;
    let (outcome, refused) = amy_waits_while(true, |locks, purpose, does| {
        if does == Does::Reads && matches!(purpose, Purpose::GrantSeveral(_)) {
            another_module_waits(locks, "w joe 1000 BLOCK 0");
            is_asked = true;
        }
    });
    assert!(is_asked && refused == 1, "{refused} times");
    let is_refused = matches!(outcome, Err(CommandError::Deadlock(_)));
    assert!(is_refused, "{outcome:?}");
}

#[test]
fn a_command_is_given_up_when_waits_begin_whenever_it_reads() {
    let mut begun = 0;
    let (outcome, _) = amy_waits_while(false, |locks, purpose, does| {
        let is_decided = matches!(purpose, Purpose::GrantSeveral(_)) || begun > 0;
        if does == Does::Reads && is_decided {
            begun += 1;
            another_module_waits(locks, &format!("w joe{begun} 1000 BLOCK 0"));
        }
    });
    assert!(begun > 100, "{begun}");
    let is_given_up = matches!(outcome, Err(CommandError::Unsettled));
    assert!(is_given_up, "{outcome:?}");
}
