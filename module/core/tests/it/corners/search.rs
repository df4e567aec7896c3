//! The search for a deadlock.

use super::*;

/// A lock, and the owners that hold it.
type HoldersOf<'r> = (&'r [u8], &'r [Box<[u8]>]);

/// A caller asks for a lock that is held, as this is stored. Each lock has the holders that are
/// named. Returns the outcome.
fn asks_for(
    locks: &mut Locks,
    request: &str,
    stored: &Stored,
    holders: &[HoldersOf<'_>],
) -> Result<Outcome, CommandError> {
    let request = Acquire::parse(words(request)).unwrap();
    let command = Command::Acquire(&request);
    searches(locks, command, holders, |_, _| Read::One(stored))
}

/// Runs a command. Each lock has the holders that are named; `reads` tells what else is read, and
/// is asked for the holders as well, since others may come between.
fn searches<'r>(
    locks: &mut Locks,
    command: Command<'_>,
    holders: &[HoldersOf<'r>],
    mut reads: impl FnMut(&mut Locks, &Task) -> Read<'r>,
) -> Result<Outcome, CommandError> {
    let mut turn = Turn::of(command, 0, u32::MAX);
    while let Some(task) = locks.next_task(&mut turn, NOW) {
        let mut read = reads(locks, &task);
        if task.purpose == Purpose::Holders {
            let name = name_of(&task);
            let of = holders.iter().find(|(lock, _)| *lock == &*name);
            read = Read::Owners(of.map_or(&[], |(_, holders)| holders));
        }
        locks.decide(&mut turn, task.found(read), NOW, &mut Vec::new());
    }
    turn.outcome()
}

const AMY: &str = "x amy 1000 BLOCK 0";

fn may_wait(outcome: &Result<Outcome, CommandError>) -> bool {
    matches!(outcome, Ok(Outcome::MustWait { .. }))
}

fn owner(name: &str) -> Box<[u8]> {
    name.as_bytes().into()
}

fn is_deadlock(outcome: &Result<Outcome, CommandError>) -> bool {
    matches!(outcome, Err(CommandError::Deadlock(_)))
}

/// Neither called a deadlock nor begun: the caller is to try again.
fn is_unsettled(outcome: &Result<Outcome, CommandError>) -> bool {
    matches!(outcome, Err(CommandError::Unsettled))
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
    let outcome = asks_for(&mut locks, AMY, &held_until(END), &holders);
    assert!(may_wait(&outcome), "{outcome:?}");
}

/// Then there can be no circle, and nobody need know the holders.
#[test]
fn where_no_other_lock_is_waited_for_nothing_is_searched() {
    let (locks, _, _) = session_with(&[("x alice 1000 SESSION s", Stored::Free)]);
    let outcome = asks_for(
        &mut ends(locks),
        "x bob 1000 BLOCK 0",
        &held_until(END),
        &[],
    );
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
    let outcome = asks_for(&mut locks, AMY, &held[0], &[(b"x", &last)]);
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
        let outcome = asks_for(&mut locks, AMY, &held_until(END), &[(b"x", &all)]);
        assert_eq!(may_wait(&outcome), is_found, "{outcome:?}");
    }
}

/// Vic has `x` and waits for `q`. Wes has `q` and waits for amy. When the hold of wes has ended,
/// vic is let in.
#[test]
fn a_circle_through_a_hold_that_is_to_end_is_none() {
    let held = held_until(END);
    for is_there in [true, false] {
        let (mut locks, _, tokens) = session_with(&[("q wes 1000 SESSION s", Stored::Free)]);
        waits(&mut locks, "q vic 1000 BLOCK 0", 1, &held);
        waits(&mut locks, "y wes 1000 BLOCK 0", 2, &held);
        let (vic, wes, amy) = ([owner("vic")], [owner("wes")], [owner("amy")]);
        let holders: [HoldersOf<'_>; 3] = [(b"x", &vic), (b"q", &wes), (b"y", &amy)];
        let outcome = asks_for(&mut locks, AMY, &held, &holders);
        assert!(is_deadlock(&outcome), "{outcome:?}");
        let mut locks = ends(locks);
        let refused = locks.counters().deadlocks_refused;
        let outcome = asks_for(&mut locks, AMY, &held, &holders);
        assert!(is_unsettled(&outcome), "{outcome:?}");
        assert_eq!(locks.counters().deadlocks_refused, refused);
        // The timer ends it, or finds it gone.
        let own = if is_there {
            owned_by(tokens[0])
        } else {
            Stored::Free
        };
        fires(&mut locks, NOW, |task| match task.purpose {
            Purpose::Release(_) => Read::One(&own),
            _ => Read::One(&Stored::Free),
        });
        let holders: [HoldersOf<'_>; 3] = [(b"x", &vic), (b"q", &vic), (b"y", &amy)];
        let outcome = asks_for(&mut locks, AMY, &held, &holders);
        assert!(may_wait(&outcome), "{outcome:?}");
    }
}

/// Rob reads `q` and waits for amy. Wes waited to write `q` and has left, so vic may read.
#[test]
fn a_circle_through_a_reader_whose_writer_has_left_is_none() {
    let mut locks = Locks::default();
    let robs = Stored::ReadWrite(read_write(None, Some(END), END));
    waits(&mut locks, "q wes 1000 WRITE BLOCK 0", 1, &robs);
    waits(&mut locks, "q vic 1000 READ BLOCK 0", 2, &robs);
    waits(&mut locks, "y rob 1000 BLOCK 0", 3, &held_until(END));
    cancel(&mut locks, "q wes", robs);
    let (vic, rob, amy) = ([owner("vic")], [owner("rob")], [owner("amy")]);
    let holders: [HoldersOf<'_>; 3] = [(b"x", &vic), (b"q", &rob), (b"y", &amy)];
    let outcome = asks_for(&mut locks, AMY, &held_until(END), &holders);
    assert!(is_unsettled(&outcome), "{outcome:?}");
}

/// The same where amy herself may read, as soon as the reader before her is let in.
#[test]
fn a_circle_through_the_lock_that_is_asked_for_is_none_if_something_is_due_there() {
    let mut locks = Locks::default();
    let robs = Stored::ReadWrite(read_write(None, Some(END), END));
    waits(&mut locks, "x wes 1000 WRITE BLOCK 0", 1, &robs);
    waits(&mut locks, "x rae 1000 READ BLOCK 0", 2, &robs);
    waits(&mut locks, "y rob 1000 BLOCK 0", 3, &held_until(END));
    cancel(&mut locks, "x wes", robs);
    let (rob, amy) = ([owner("rob")], [owner("amy")]);
    let holders: [HoldersOf<'_>; 2] = [(b"x", &rob), (b"y", &amy)];
    let outcome = asks_for(&mut locks, "x amy 1000 READ BLOCK 0", &robs, &holders);
    assert!(is_unsettled(&outcome), "{outcome:?}");
}

fn cancel(locks: &mut Locks, request: &str, stored: Stored) {
    let request = Cancel::parse(words(request)).unwrap();
    decide(locks, Command::Cancel(&request), &[stored]);
}

/// Mia waits for `q`, `k` and `r`, and vic behind her for `q`. Wes holds `r` and waits for amy. `k`
/// was overwritten: that ends the wait of mia, and vic is let in.
#[test]
fn a_circle_through_a_wait_for_several_is_none_if_something_is_due_at_any_of_them() {
    let held = held_until(END);
    for (changed, is_none) in [("k", true), ("r", true), ("z", false)] {
        let mut locks = Locks::default();
        let mia = "mia 1000 3 q k r BLOCK 0";
        waits_for_several(&mut locks, mia, 1, &[Stored::Free, Stored::Free, held]);
        waits(&mut locks, "q vic 1000 BLOCK 0", 2, &held);
        waits(&mut locks, "y wes 1000 BLOCK 0", 3, &held);
        waits(&mut locks, "z joe 1000 BLOCK 0", 4, &held);
        locks.changed(at(changed.as_bytes()));
        let (vic, wes, amy) = ([owner("vic")], [owner("wes")], [owner("amy")]);
        let holders: [HoldersOf<'_>; 3] = [(b"x", &vic), (b"r", &wes), (b"y", &amy)];
        let outcome = asks_for(&mut locks, AMY, &held, &holders);
        let is_right = if is_none { is_unsettled } else { is_deadlock };
        assert!(is_right(&outcome), "{changed}: {outcome:?}");
    }
}

/// A hold of `q` whose lease is over is ended when the search reads it, so vic may have it.
#[test]
fn a_circle_through_a_hold_that_expires_while_it_is_read_is_none() {
    let (mut locks, held) = (Locks::default(), held_until(END));
    waits(&mut locks, "q vic 1000 BLOCK 0", 1, &held);
    let bea = "bea 1000 2 q y BLOCK 0";
    waits_for_several(&mut locks, bea, 2, &[held, held]);
    waits(&mut locks, "y wes 1000 BLOCK 0", 3, &held);
    let (vic, wes, amy) = ([owner("vic")], [owner("wes")], [owner("amy")]);
    let holders: [HoldersOf<'_>; 3] = [(b"x", &vic), (b"q", &wes), (b"y", &amy)];
    let request = Acquire::parse(words(AMY)).unwrap();
    let command = Command::Acquire(&request);
    let outcome = searches(&mut locks, command, &holders, |locks, task| {
        if task.purpose == Purpose::Holders && name_of(task) == b"q" {
            locks.changed(at(b"q"));
        }
        Read::One(&held)
    });
    assert!(is_unsettled(&outcome), "{outcome:?}");
}

/// Wes holds `q`, and waits for `q` and `r` together. Vic is ahead of him at `q`, but a holder
/// waits for nobody there. When the hold ends, vic has `q`, and wes waits for vic.
#[test]
fn a_circle_that_the_end_of_a_hold_is_about_to_close_is_not_begun() {
    let held = held_until(END);
    let (mut locks, _, _) = session_with(&[("q wes 1000 SESSION s", Stored::Free)]);
    waits(&mut locks, "q vic 1000 BLOCK 0", 1, &held);
    waits_for_several(&mut locks, "wes 1000 2 q r BLOCK 0", 2, &[held, held]);
    let (wes, zed) = ([owner("wes")], [owner("zed")]);
    let holders: [HoldersOf<'_>; 3] = [(b"y", &wes), (b"q", &wes), (b"r", &zed)];
    let vic = "y vic 1000 BLOCK 0";
    let outcome = asks_for(&mut locks, vic, &held, &holders);
    assert!(may_wait(&outcome), "{outcome:?}");
    let outcome = asks_for(&mut ends(locks), vic, &held, &holders);
    assert!(is_unsettled(&outcome), "{outcome:?}");
}

/// Amy has `z` and asks for `x` and `f`. Vic has `x` and waits for `q`. While `q` is read, another
/// module hears of that key and sends this command.
fn amy_waits_while_another_module(sends: Command<'_>) -> Result<Outcome, CommandError> {
    let (mut locks, held) = (Locks::default(), held_until(END));
    waits(&mut locks, "q vic 1000 BLOCK 0", 1, &held);
    waits(&mut locks, "z bob 1000 BLOCK 0", 2, &held);
    let (vic, amy, bob) = ([owner("vic")], [owner("amy")], [owner("bob")]);
    let before: [HoldersOf<'_>; 2] = [(b"x", &vic), (b"z", &amy)];
    let takes_f = matches!(sends, Command::Acquire(request) if request.key == b"f");
    let of_f: &[Box<[u8]>] = if takes_f { &bob } else { &[] };
    let after: [HoldersOf<'_>; 3] = [(b"x", &vic), (b"z", &amy), (b"f", of_f)];
    let (is_free, is_taken) = ([held, Stored::Free], [held, held]);
    let wait = MultiAcquire::parse(words("amy 1000 2 x f BLOCK 0")).unwrap();
    let (command, mut is_sent) = (Command::MultiAcquire(&wait), false);
    searches(&mut locks, command, &after, |locks, task| {
        if task.purpose == Purpose::Holders && name_of(task) == b"q" && !is_sent {
            is_sent = true;
            let (mut turn, mut effects) = (Turn::of(sends, 0, 10), Vec::new());
            while let Some(task) = locks.next_task(&mut turn, NOW) {
                let owners = before.iter().find(|(lock, _)| {
                    task.purpose == Purpose::Holders && *lock == &*name_of(&task)
                });
                let read = match task.purpose {
                    Purpose::Holders => Read::Owners(owners.map_or(&[], |of| of.1)),
                    _ if takes_f => Read::One(&Stored::Free),
                    _ => Read::One(&held),
                };
                locks.decide(&mut turn, task.found(read), NOW, &mut effects);
            }
            let client = BlockedClient {
                handle: 3,
                client_id: 5,
            };
            locks.enqueue(&mut turn, Some(client), NOW, &mut effects);
        }
        Read::Several(if is_sent && takes_f {
            &is_taken
        } else {
            &is_free
        })
    })
}

#[test]
fn what_another_module_does_within_the_search_closes_no_circle() {
    // Vic waits for amy, or bob takes what she asks for.
    for (sends, closes) in [
        ("z vic 1000 BLOCK 0", true),
        ("f bob 1000", true),
        ("w joe 1000 BLOCK 0", false),
    ] {
        let request = Acquire::parse(words(sends)).unwrap();
        let outcome = amy_waits_while_another_module(Command::Acquire(&request));
        let is_right = if closes { is_deadlock } else { may_wait };
        assert!(is_right(&outcome), "{sends}: {outcome:?}");
    }
}

#[test]
fn an_owner_that_another_module_queues_within_the_search_waits_once() {
    let request = Acquire::parse(words(AMY)).unwrap();
    let outcome = amy_waits_while_another_module(Command::Acquire(&request));
    assert!(matches!(outcome, Err(CommandError::Waiting)), "{outcome:?}");
}
