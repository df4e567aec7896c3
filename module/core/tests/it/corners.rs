//! Corners that the random histories seldom reach: single turns, each with the readings that lead
//! there.

use crate::wanted::{LIMITS, NOW, asked, decide, words};
use rlock_core::request::{Acquire, Cancel, Events, MultiAcquire, Release, Renew};
use rlock_core::{
    BlockedClient, CHAIN_MAX, Command, CommandError, Count, Effect, Field, Hash, Holder, Known,
    LockRef, Locks, Mode, Now, Outcome, Permits, PermitsHash, PermitsHold, PermitsHolders, Purpose,
    Read, ReadDepth, ReadHold, ReadWrite, Room, SessionId, Stored, Subject, Task, Token, Turn,
    Wait, WaitOutcome, Write,
};

const END: i64 = 2_000_000;

fn at(name: &[u8]) -> LockRef<'_> {
    LockRef { db: 0, name }
}

/// Another owner holds it.
fn held_until(ends_at: i64) -> Stored {
    Stored::Plain(Hash {
        own: None,
        token: Known::read(Token::new(7)),
        others: true,
        ends_at: Known::read(Some(ends_at)),
    })
}

/// The owner that it is read for holds it, alone.
fn owned_by(token: Token) -> Stored {
    Stored::Plain(Hash {
        own: Some(Count::Valid(1)),
        token: Known::read(Some(token)),
        others: false,
        ends_at: Known::read(Some(END)),
    })
}

fn is_grant(effect: &Effect) -> bool {
    matches!(effect, Effect::Grant { .. })
}

fn permits(own: Option<PermitsHold>, others_end: Option<i64>, ends_at: i64) -> PermitsHash {
    PermitsHash {
        own,
        others_end,
        room: Room::Now,
        limit: Permits::new(9),
        ends_at: Some(ends_at),
        is_there: true,
        ..PermitsHash::default()
    }
}

/// A client waits with this request, for a lock that is stored like this.
fn waits(locks: &mut Locks, request: &str, handle: usize, stored: &Stored) {
    let request = Acquire::parse(words(request)).unwrap();
    begin(
        locks,
        Command::Acquire(&request),
        handle,
        &Read::One(stored),
    );
}

fn begin(locks: &mut Locks, command: Command<'_>, handle: usize, read: &Read<'_>) {
    let (mut turn, mut effects) = (Turn::of(command, 0, u32::MAX), Vec::new());
    while let Some(task) = locks.next_task(&mut turn, NOW) {
        let read = match task.purpose {
            Purpose::Holders => Read::Owners(&[]),
            _ => read.clone(),
        };
        locks.decide(&mut turn, task.found(read), NOW, &mut effects);
    }
    let client = BlockedClient {
        handle,
        client_id: 5,
    };
    let joined = locks.enqueue(&mut turn, Some(client), NOW, &mut effects);
    assert!(joined.is_some(), "{:?}", turn.outcome());
}

/// Fires the timer once. `read` answers each task. Returns the purposes and the effects.
fn fires<'r>(
    locks: &mut Locks,
    now: Now,
    mut read: impl FnMut(&Task) -> Read<'r>,
) -> (Vec<Purpose>, Vec<Effect>) {
    let (mut purposes, mut effects) = (Vec::new(), Vec::new());
    locks.passed(now, &mut effects);
    let mut turn = Turn::of_timer();
    while let Some(task) = locks.next_task(&mut turn, now) {
        purposes.push(task.purpose);
        let read = read(&task);
        locks.decide(&mut turn, task.found(read), now, &mut effects);
    }
    (purposes, effects)
}

/// The lock that a task is about.
fn name_of(task: &Task) -> Vec<u8> {
    match &task.subject {
        Subject::One(lock, _) => lock.name.to_vec(),
        other => panic!("{other:?}"),
    }
}

fn writes(effects: &[Effect]) -> Vec<&Write> {
    let mut writes = Vec::new();
    for effect in effects {
        if let Effect::Write { write, .. } = effect {
            writes.push(write);
        }
    }
    writes
}

/// The handles of the clients that leave with nothing.
fn refused(effects: &[Effect]) -> Vec<usize> {
    let client = |effect: &Effect| match effect {
        Effect::Leave {
            client,
            why: WaitOutcome::Refused(_),
        } => Some(*client),
        _ => None,
    };
    effects.iter().filter_map(client).collect()
}

/// A session with these holds, each taken with this request where this is stored. Returns their
/// tokens as well.
fn session_with(holds: &[(&str, Stored)]) -> (Locks, SessionId, Vec<Token>) {
    let mut locks = Locks::default();
    let listens = Events::parse(words("s")).unwrap();
    let session = locks.attach(&listens, 1, LIMITS, NOW, &mut Vec::new());
    let session = session.unwrap().session;
    let told = locks.take_events(session, NOW);
    assert!(told.unwrap().events.is_empty());
    let tokens = holds.iter().map(|(request, stored)| {
        let request = Acquire::parse(words(request)).unwrap();
        match decide(&mut locks, Command::Acquire(&request), &[*stored]).1 {
            Outcome::Held { token, .. } => token,
            other => panic!("{other:?}"),
        }
    });
    let tokens = tokens.collect();
    (locks, session, tokens)
}

/// The session has ended with its connection.
fn ends(mut locks: Locks) -> Locks {
    locks.client_gone(1, NOW, &mut Vec::new());
    locks
}

// --- Holds that end outside of a command ---------------------------------------------------------

/// Alice and perhaps bob hold a permit for a session that ends, and alice's is found. Then this is
/// read for the last of them. Returns the writes for it.
fn last_end(owners: &[&str], last: Stored) -> Vec<Write> {
    let held = Stored::Permits(permits(None, Some(END), END));
    let requests: Vec<String> = owners
        .iter()
        .map(|owner| format!("k {owner} 1000 PERMITS 1 SESSION s"))
        .collect();
    let holds: Vec<_> = requests.iter().map(|of| (of.as_str(), held)).collect();
    let (locks, _, tokens) = session_with(&holds);
    let mut locks = ends(locks);
    let mut read = 0;
    let own = PermitsHold {
        permits: Permits::new(1).unwrap(),
        ends_at: END,
        token: tokens[0],
    };
    let all = Stored::Permits(permits(Some(own), Some(END), END));
    let (purposes, effects) = fires(&mut locks, NOW, |task| {
        assert_eq!(task.purpose, Purpose::Release(Mode::Permits));
        read += 1;
        Read::One(if read == owners.len() { &last } else { &all })
    });
    assert_eq!(purposes.len(), owners.len());
    let writes: Vec<Write> = writes(&effects).into_iter().cloned().collect();
    // The first takes its field away, and leaves the key's end to the last one.
    let first = [Write::Remove(Field::Owner(Holder::Caller))];
    let (before, last) = writes.split_at(owners.len() - 1);
    assert_eq!(before, &first[..owners.len() - 1]);
    last.to_vec()
}

#[test]
fn the_last_of_several_ends_sets_the_end_of_permits_even_if_it_ends_nothing() {
    let of_carol = Stored::Permits(permits(None, Some(END - 500), END));
    assert_eq!(
        last_end(&["alice", "bob"], of_carol),
        [Write::ExpireAt(END - 500)]
    );
    // Nobody holds any: the key goes.
    assert_eq!(
        last_end(&["alice", "bob"], Stored::NoHolder),
        [Write::Delete]
    );
}

/// Others have given alice another hold, and set the key's end.
#[test]
fn an_end_that_ends_nothing_leaves_the_end_of_permits() {
    let other = PermitsHold {
        permits: Permits::new(1).unwrap(),
        ends_at: END,
        token: Token::new(3).unwrap(),
    };
    let newer = Stored::Permits(permits(Some(other), None, END - 500));
    assert_eq!(last_end(&["alice"], newer), []);
    assert_eq!(last_end(&["alice"], Stored::NoHolder), []);
}

/// It looks at the others only if the key may have to end earlier.
#[test]
fn a_single_end_need_not_read_all_readers() {
    let (locks, _, _) = session_with(&[("k alice 1000 READ SESSION s", Stored::Free)]);
    let task = ends(locks).next_task(&mut Turn::of_timer(), NOW).unwrap();
    assert_eq!(task.purpose, Purpose::Release(Mode::Read));
    assert_eq!(task.depth, ReadDepth::WholeUnlessOutlived);
}

/// In the other order the writer would become a reader in between.
#[test]
fn a_writers_reading_ends_before_its_writing() {
    let writes = |own_read| {
        Stored::ReadWrite(ReadWrite {
            own_write: Some(rlock_core::WriteHold {
                count: Count::Valid(1),
                token: Token::new(7),
            }),
            own_read,
            others_write: false,
            others_token: None,
            others_read: None,
            ends_at: Known::read(Some(END)),
            is_partial: false,
        })
    };
    let (locks, _, _) = session_with(&[
        ("k alice 1000 WRITE SESSION s", Stored::Free),
        ("k alice 1000 READ SESSION s", writes(None)),
    ]);
    let reader = ReadHold {
        count: Count::Valid(1),
        token: None,
        ends_at: Known::read(END),
    };
    let stored = writes(Some(reader));
    let (purposes, _) = fires(&mut ends(locks), NOW, |_| Read::One(&stored));
    let of = Purpose::Release;
    assert_eq!(purposes, [of(Mode::Read), of(Mode::Write)]);
}

/// When a command's time is up, it still ends what its own owner should no longer have, and leaves
/// the others' to the timer.
#[test]
fn a_command_whose_time_is_up_ends_only_its_own_owners_hold() {
    let held = |own: Option<Token>| {
        Stored::Permits(permits(
            own.map(|token| PermitsHold {
                permits: Permits::new(1).unwrap(),
                ends_at: END,
                token,
            }),
            Some(END),
            END,
        ))
    };
    for (owner, should) in [("carol", 0), ("bob", 1)] {
        let (locks, _, tokens) = session_with(&[
            ("k alice 1000 PERMITS 1 SESSION s", held(None)),
            ("k bob 1000 PERMITS 1 SESSION s", held(None)),
        ]);
        let mut locks = ends(locks);
        let request = format!("k {owner} PERMITS 1");
        let request = Release::parse(words(&request)).unwrap();
        let mut turn = Turn::of(Command::Release(&request), 0, 10).with_budget(0);
        let (mut ended, stored) = (0, held(Some(tokens[1])));
        while let Some(task) = locks.next_task(&mut turn, NOW) {
            if task.purpose == Purpose::Command {
                break;
            }
            ended += 1;
            locks.decide(
                &mut turn,
                task.found(Read::One(&stored)),
                NOW,
                &mut Vec::new(),
            );
        }
        assert_eq!(ended, should, "{owner}");
    }
}

// --- What cannot be read -------------------------------------------------------------------------

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
    let wait = MultiAcquire::parse(words("bob 1000 2 a b BLOCK 0")).unwrap();
    let both = [Stored::Free, held_until(END)];
    begin(
        &mut locks,
        Command::MultiAcquire(&wait),
        1,
        &Read::Several(&both),
    );
    locks.changed(at(b"b"));
    let elsewhere = Read::Elsewhere(CommandError::SlotOnItsWay);
    let (purposes, effects) = fires(&mut locks, NOW, |task| match task.purpose {
        Purpose::GrantSeveral(_) => Read::NotHere(0),
        _ if name_of(task) == b"a" => elsewhere.clone(),
        _ => Read::One(&Stored::Free),
    });
    assert_eq!(refused(&effects), [1], "{purposes:?}");
}

// --- Queues --------------------------------------------------------------------------------------

/// The key of former permits is there, with nobody in it, and ends when bob's lease will.
#[test]
fn permits_begin_without_the_rest_of_former_ones() {
    let mut locks = Locks::default();
    let held = Stored::Permits(PermitsHash {
        room: Room::At(END),
        ..permits(None, Some(END), END)
    });
    waits(&mut locks, "k alice 50 BLOCK 0 PERMITS 1", 1, &held);
    waits(&mut locks, "k bob 5000 BLOCK 0 PERMITS 1", 2, &held);
    locks.changed(at(b"k"));
    let (alice_end, bob_end) = (NOW.wall_ms() + 50, NOW.wall_ms() + 5000);
    let rest = permits(None, None, bob_end);
    let nobody = PermitsHolders::default();
    let (_, effects) = fires(&mut locks, NOW, |_| Read::Permits(&rest, &nobody));
    let writes = writes(&effects);
    assert_eq!(writes[0], &Write::Delete);
    assert!(writes.contains(&&Write::ExpireAt(alice_end)), "{writes:?}");
    assert_eq!(writes.last(), Some(&&Write::ExpireAt(bob_end)));
}

/// A plain waiter is ahead, so these cannot be told by the look at the first.
#[test]
fn waits_for_several_at_a_lock_that_became_another_kind_are_refused_in_portions() {
    for (number, looks) in [(100, 1), (150, 2)] {
        let mut locks = Locks::default();
        waits(&mut locks, "k zed 1000 BLOCK 0", 999, &held_until(END));
        let both = [held_until(END), Stored::Free];
        for handle in 0..number {
            let wait = format!("o{handle} 1000 2 k x{handle} BLOCK 0");
            let wait = MultiAcquire::parse(words(&wait)).unwrap();
            begin(
                &mut locks,
                Command::MultiAcquire(&wait),
                handle,
                &Read::Several(&both),
            );
        }
        let readers = Stored::ReadWrite(ReadWrite {
            own_write: None,
            own_read: None,
            others_write: false,
            others_token: None,
            others_read: Some(END),
            ends_at: Known::read(Some(END)),
            is_partial: false,
        });
        locks.changed(at(b"k"));
        let (purposes, effects) = fires(&mut locks, NOW, |_| Read::One(&readers));
        assert_eq!(refused(&effects).len(), number);
        assert_eq!(purposes.len(), looks);
        assert_eq!(locks.gauges().waiters, 1, "zed still waits");
    }
}

/// The next command has its own work to do.
#[test]
fn what_a_command_has_no_time_for_is_left_to_the_timer() {
    let mut locks = Locks::default();
    let held = Stored::Permits(PermitsHash {
        room: Room::At(END),
        ..permits(None, Some(END), END)
    });
    waits(&mut locks, "k bob 1000 BLOCK 0 PERMITS 1", 1, &held);
    let own = PermitsHold {
        permits: Permits::new(1).unwrap(),
        ends_at: END,
        token: Token::new(7).unwrap(),
    };
    let (alices, others) = (
        Stored::Permits(permits(Some(own), None, END)),
        Stored::Permits(permits(None, Some(END), END)),
    );
    let release = Release::parse(words("k alice PERMITS 1")).unwrap();
    let renew = Renew::parse(words("k carol 1000 PERMITS")).unwrap();
    for (mut turn, stored) in [
        (
            Turn::of(Command::Release(&release), 0, 10).with_budget(0),
            alices,
        ),
        (Turn::of(Command::Renew(&renew), 0, 10), others),
    ] {
        let mut purposes = Vec::new();
        while let Some(task) = locks.next_task(&mut turn, NOW) {
            purposes.push(task.purpose);
            locks.decide(
                &mut turn,
                task.found(Read::One(&stored)),
                NOW,
                &mut Vec::new(),
            );
        }
        assert_eq!(purposes, [Purpose::Command]);
        assert_eq!(locks.next_deadline(NOW), Some(0));
    }
}

/// Neither many holds nor many queues keep the others waiting.
#[test]
fn holds_and_queues_are_looked_at_in_turn() {
    let (mut locks, _, tokens) = session_with(&[
        ("a alice 1000 SESSION s", Stored::Free),
        ("b alice 1000 SESSION s", Stored::Free),
    ]);
    for (handle, name) in ["c", "d"].into_iter().enumerate() {
        let request = format!("{name} bob{handle} 1000 BLOCK 0");
        waits(&mut locks, &request, handle, &held_until(END));
    }
    for name in [b"a", b"b", b"c", b"d"] {
        locks.changed(at(name));
    }
    let (of_a, of_b, held) = (owned_by(tokens[0]), owned_by(tokens[1]), held_until(END));
    let (purposes, _) = fires(&mut locks, NOW, |task| match &*name_of(task) {
        b"a" => Read::One(&of_a),
        b"b" => Read::One(&of_b),
        _ => Read::One(&held),
    });
    let is_hold = |purpose: &Purpose| matches!(purpose, Purpose::CheckHold(_));
    let order: Vec<bool> = purposes.iter().map(is_hold).collect();
    assert_eq!(order, [true, false, true, false]);
}

/// The lock had no end when the first began to wait.
#[test]
fn a_new_waiter_tells_the_queue_when_the_lease_ends() {
    let mut locks = Locks::default();
    let endless = Stored::Plain(Hash {
        own: None,
        token: Known::read(Token::new(7)),
        others: true,
        ends_at: Known::read(None),
    });
    waits(&mut locks, "k bob 1000 BLOCK 0", 1, &endless);
    assert_eq!(locks.next_deadline(NOW), Some(1000));
    let end = NOW.wall_ms() + 50;
    waits(&mut locks, "k carol 1000 BLOCK 0", 2, &held_until(end));
    assert_eq!(locks.next_deadline(NOW), Some(51));
}

/// Others wrote permits over the key that a plain waiter waits for.
#[test]
fn the_end_of_permits_is_known_to_a_plain_waiter() {
    let mut locks = Locks::default();
    waits(&mut locks, "k bob 1000 BLOCK 0", 1, &held_until(END));
    locks.changed(at(b"k"));
    let end = NOW.wall_ms() + 50;
    let written = Stored::Permits(permits(None, Some(end), end));
    fires(&mut locks, NOW, |_| Read::One(&written));
    assert_eq!(locks.next_deadline(NOW), Some(51));
}

fn read_write(own_read: Option<i64>, others_read: Option<i64>, ends_at: i64) -> ReadWrite {
    ReadWrite {
        own_write: None,
        own_read: own_read.map(|end| ReadHold {
            count: Count::Valid(1),
            token: Token::new(7),
            ends_at: Known::read(end),
        }),
        others_write: false,
        others_token: None,
        others_read,
        ends_at: Known::read(Some(ends_at)),
        is_partial: false,
    }
}

/// Others made the key last longer than the readers' leases.
#[test]
fn a_readers_lease_that_ran_out_counts_as_expired() {
    let (soon, end) = (NOW.wall_ms() + 500, NOW.wall_ms() + 5000);
    let mut locks = Locks::default();
    let held = Stored::ReadWrite(read_write(None, Some(soon), end));
    waits(&mut locks, "k bob 1000 WRITE BLOCK 0", 1, &held);
    let again = Acquire::parse(words("k alice 300 READ")).unwrap();
    let own = Stored::ReadWrite(read_write(Some(soon), None, end));
    decide(&mut locks, Command::Acquire(&again), &[own]);
    fires(&mut locks, NOW.after(501), |_| Read::One(&Stored::Free));
    assert_eq!(locks.counters().expiries, 1);
}

/// The writer's own reading ends before the lock does.
#[test]
fn the_end_of_a_writers_reading_is_not_the_end_of_the_lock() {
    let writes = |own_read| {
        let hold = rlock_core::WriteHold {
            count: Count::Valid(1),
            token: Token::new(7),
        };
        ReadWrite {
            own_write: Some(hold),
            ..read_write(own_read, None, END)
        }
    };
    let mut locks = Locks::default();
    let held = Stored::ReadWrite(ReadWrite {
        own_write: None,
        others_write: true,
        ..writes(None)
    });
    waits(&mut locks, "k bob 1000 WRITE BLOCK 0", 1, &held);
    let reads = Acquire::parse(words("k alice 500 READ")).unwrap();
    let own = Stored::ReadWrite(writes(None));
    decide(&mut locks, Command::Acquire(&reads), &[own]);
    locks.changed(at(b"k"));
    fires(&mut locks, NOW.after(500), |_| Read::One(&Stored::Free));
    assert_eq!(locks.counters().expiries, 0);
}

/// The lock is read for the waiter once more only if it may let the waiter in.
#[test]
fn a_reader_that_leaves_others_reading_costs_a_waiting_writer_no_look() {
    let mut locks = Locks::default();
    let held = Stored::ReadWrite(read_write(None, Some(END), END));
    waits(&mut locks, "k bob 1000 WRITE BLOCK 0", 1, &held);
    let release = Release::parse(words("k alice READ")).unwrap();
    let mut turn = Turn::of(Command::Release(&release), 0, 10);
    let own = Stored::ReadWrite(read_write(Some(END), Some(END), END));
    let mut purposes = Vec::new();
    while let Some(task) = locks.next_task(&mut turn, NOW) {
        purposes.push(task.purpose);
        locks.decide(&mut turn, task.found(Read::One(&own)), NOW, &mut Vec::new());
    }
    assert_eq!(purposes, [Purpose::Command]);
}

/// All its locks are read only when the one that keeps it out has changed.
#[test]
fn a_wait_for_several_is_looked_at_for_the_lock_that_keeps_it_out() {
    let mut locks = Locks::default();
    let wait = MultiAcquire::parse(words("bob 1000 3 a b c BLOCK 0")).unwrap();
    let held = [Stored::Free, Stored::Free, held_until(END)];
    begin(
        &mut locks,
        Command::MultiAcquire(&wait),
        1,
        &Read::Several(&held),
    );
    let mut times_read = |changed: &[&[u8]]| {
        for name in changed {
            locks.changed(at(name));
        }
        let (purposes, _) = fires(&mut locks, NOW, |task| match task.purpose {
            Purpose::GrantSeveral(_) => Read::Several(&held),
            _ if name_of(task) == b"c" => Read::One(&held[2]),
            _ => Read::One(&Stored::Free),
        });
        let is_of_all = |purpose: &&Purpose| matches!(purpose, Purpose::GrantSeveral(_));
        purposes.iter().filter(is_of_all).count()
    };
    times_read(&[b"c"]);
    assert_eq!(times_read(&[b"a", b"b"]), 0);
    assert_eq!(times_read(&[b"c"]), 1);
}

/// The delay begins between the mark and the look, and its end is the last that marks the wait.
#[test]
fn a_wait_for_several_that_the_grant_delay_kept_back_is_granted_at_its_end() {
    let mut locks = Locks::default();
    locks.start_grant_delay(NOW, 0);
    let wait = MultiAcquire::parse(words("bob 1000 2 a b BLOCK 0")).unwrap();
    let held = [held_until(END), held_until(END)];
    begin(
        &mut locks,
        Command::MultiAcquire(&wait),
        1,
        &Read::Several(&held),
    );
    let release = Release::parse(words("a alice")).unwrap();
    let mut turn = Turn::of(Command::Release(&release), 0, 10).with_budget(0);
    let own = owned_by(Token::new(7).unwrap());
    while let Some(task) = locks.next_task(&mut turn, NOW) {
        locks.decide(&mut turn, task.found(Read::One(&own)), NOW, &mut Vec::new());
    }
    locks.set_grant_delay(5000);
    let free = [Stored::Free, Stored::Free];
    let mut is_granted_after = |ms| {
        let (_, effects) = fires(&mut locks, NOW.after(ms), |task| match task.purpose {
            Purpose::GrantSeveral(_) => Read::Several(&free),
            _ => Read::One(&Stored::Free),
        });
        effects.iter().any(is_grant)
    };
    assert!(!is_granted_after(0));
    assert!(is_granted_after(5000));
}

#[test]
fn a_wait_for_one_of_several_that_is_over_is_told_how_long_the_lease_lasts() {
    let mut locks = Locks::default();
    let wait = MultiAcquire::parse(words("bob 1000 1 k BLOCK 50")).unwrap();
    let held = [held_until(END)];
    begin(
        &mut locks,
        Command::MultiAcquire(&wait),
        1,
        &Read::Several(&held),
    );
    // Others have made a read-write lock of it.
    let readers = [Stored::ReadWrite(read_write(None, Some(END), END))];
    let (now, mut effects) = (NOW.after(50), Vec::new());
    let mut turn = Turn::of_deadlines();
    while let Some(task) = locks.next_task(&mut turn, now) {
        assert_eq!(task.purpose, Purpose::TimeOut);
        locks.decide(
            &mut turn,
            task.found(Read::Several(&readers)),
            now,
            &mut effects,
        );
    }
    let ttl_ms = END - now.wall_ms();
    let why = WaitOutcome::NotAcquired { ttl_ms };
    assert_eq!(effects, [Effect::Leave { client: 1, why }]);
}

/// Its holder's session ends just after the command was decided, while the caller still looks for a
/// deadlock.
#[test]
fn a_lock_that_is_freed_while_a_wait_begins_is_looked_at_at_once() {
    let (mut locks, _, tokens) = session_with(&[("x alice 1000 SESSION s", Stored::Free)]);
    waits(&mut locks, "other dave 1000 BLOCK 0", 1, &held_until(END));
    let wait = Acquire::parse(words("x carol 1000 BLOCK 0")).unwrap();
    let (mut turn, mut effects) = (Turn::of(Command::Acquire(&wait), 0, 10), Vec::new());
    let (held, own) = (held_until(END), owned_by(tokens[0]));
    let mut purposes = Vec::new();
    while let Some(task) = locks.next_task(&mut turn, NOW) {
        purposes.push(task.purpose);
        let read = match task.purpose {
            Purpose::Holders => Read::Owners(&[]),
            Purpose::Release(_) => Read::One(&own),
            _ => Read::One(&held),
        };
        locks.decide(&mut turn, task.found(read), NOW, &mut effects);
        if task.purpose == Purpose::Command {
            locks.client_gone(1, NOW, &mut effects);
        }
    }
    let should = [
        Purpose::Command,
        Purpose::Release(Mode::Plain),
        Purpose::Holders,
    ];
    assert_eq!(purposes, should);
    let client = BlockedClient {
        handle: 2,
        client_id: 5,
    };
    let joined = locks.enqueue(&mut turn, Some(client), NOW, &mut effects);
    assert!(joined.is_some(), "{:?}", turn.outcome());
    let (_, effects) = fires(&mut locks, NOW, |_| Read::One(&Stored::Free));
    assert!(effects.iter().any(is_grant), "{effects:?}");
}

/// So does a caller that does not wait.
#[test]
fn a_caller_that_is_refused_tells_the_queue_when_the_lease_ends() {
    let mut locks = Locks::default();
    waits(&mut locks, "k bob 1000 BLOCK 0", 1, &held_until(END));
    let end = NOW.wall_ms() + 50;
    let asks = Acquire::parse(words("k carol 1000")).unwrap();
    let (_, outcome) = decide(&mut locks, Command::Acquire(&asks), &[held_until(end)]);
    assert_eq!(outcome, Outcome::NotHeld { ttl_ms: 50 });
    assert_eq!(locks.next_deadline(NOW), Some(51));
}

/// Bob waits while others have written over his session's hold, which then is to end. It might end
/// the hold that he waits for.
#[test]
fn a_waiter_whose_former_hold_is_about_to_end_is_not_granted_before_that() {
    let (mut locks, _, _) = session_with(&[("k bob 1000 SESSION s", Stored::Free)]);
    waits(&mut locks, "k bob 1000 BLOCK 0", 1, &held_until(END));
    locks.client_gone(1, NOW, &mut Vec::new());
    let release = Release::parse(words("k alice")).unwrap();
    let mut turn = Turn::of(Command::Release(&release), 0, 10).with_budget(0);
    let (own, mut effects) = (owned_by(Token::new(7).unwrap()), Vec::new());
    let mut purposes = Vec::new();
    while let Some(task) = locks.next_task(&mut turn, NOW) {
        purposes.push(task.purpose);
        locks.decide(&mut turn, task.found(Read::One(&own)), NOW, &mut effects);
    }
    assert_eq!(purposes, [Purpose::Command]);
    assert!(!effects.iter().any(is_grant), "{effects:?}");
    let (purposes, effects) = fires(&mut locks, NOW, |_| Read::One(&Stored::Free));
    assert_eq!(purposes[0], Purpose::Release(Mode::Plain));
    assert!(effects.iter().any(is_grant), "{effects:?}");
}

#[test]
fn a_lock_that_is_freed_before_its_lease_ends_has_not_expired() {
    for (after_ms, expired) in [(0, 0), (1001, 1)] {
        let mut locks = Locks::default();
        let end = NOW.wall_ms() + 1000;
        waits(&mut locks, "k bob 1000 BLOCK 0", 1, &held_until(end));
        locks.changed(at(b"k"));
        fires(&mut locks, NOW.after(after_ms), |_| {
            Read::One(&Stored::Free)
        });
        assert_eq!(locks.counters().expiries, expired);
    }
}

// --- The deadlock search -------------------------------------------------------------------------

/// A lock, and the owners that hold it.
type HoldersOf<'r> = (&'r [u8], &'r [Box<[u8]>]);

/// A caller asks for `x`. Returns the outcome, when each lock has the holder that is named.
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
    let outcome = asks_for_x(&mut locks, "amy", &holders, &owned_by(tokens[0]), 1000);
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
    let outcome = asks_for_x(&mut locks, "amy", &holders, &Stored::Free, 1000);
    assert!(
        matches!(outcome, Ok(Outcome::MustWait { .. })),
        "{outcome:?}"
    );
}

/// Then there can be no circle, and nobody need know the holders.
#[test]
fn where_no_other_lock_is_waited_for_nothing_is_searched() {
    let (locks, _, _) = session_with(&[("x alice 1000 SESSION s", Stored::Free)]);
    let outcome = asks_for_x(&mut ends(locks), "bob", &[], &Stored::Free, 0);
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
    let outcome = asks_for_x(&mut locks, "amy", &[(b"x", &last)], &Stored::Free, 100_000);
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
        let outcome = asks_for_x(&mut locks, "amy", &[(b"x", &all)], &Stored::Free, 1000);
        let may_wait = matches!(outcome, Ok(Outcome::MustWait { .. }));
        assert_eq!(may_wait, is_found, "{outcome:?}");
    }
}

// --- Sessions ------------------------------------------------------------------------------------

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
