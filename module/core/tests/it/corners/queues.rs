//! When a queue is looked at, how often, and what for.

use super::*;

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
            waits_for_several(&mut locks, &wait, handle, &both);
        }
        let readers = Stored::ReadWrite(read_write(None, Some(END), END));
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
    for (turn, stored) in [
        (
            Turn::of(Command::Release(&release), 0, 10).with_budget(0),
            alices,
        ),
        (Turn::of(Command::Renew(&renew), 0, 10), others),
    ] {
        let (purposes, _) = runs(&mut locks, turn, &stored);
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
    let turn = Turn::of(Command::Release(&release), 0, 10);
    let own = Stored::ReadWrite(read_write(Some(END), Some(END), END));
    let (purposes, _) = runs(&mut locks, turn, &own);
    assert_eq!(purposes, [Purpose::Command]);
}

/// All its locks are read only when the one that keeps it out has changed.
#[test]
fn a_wait_for_several_is_looked_at_for_the_lock_that_keeps_it_out() {
    let mut locks = Locks::default();
    let held = [Stored::Free, Stored::Free, held_until(END)];
    waits_for_several(&mut locks, "bob 1000 3 a b c BLOCK 0", 1, &held);
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
    let held = [held_until(END), held_until(END)];
    waits_for_several(&mut locks, "bob 1000 2 a b BLOCK 0", 1, &held);
    let release = Release::parse(words("a alice")).unwrap();
    let turn = Turn::of(Command::Release(&release), 0, 10).with_budget(0);
    runs(&mut locks, turn, &owned_by(Token::new(7).unwrap()));
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
    let held = [held_until(END)];
    waits_for_several(&mut locks, "bob 1000 1 k BLOCK 50", 1, &held);
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
fn a_lock_that_is_freed_while_a_wait_begins_is_granted_to_the_waiter() {
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
            _ => Read::One(&held),
        };
        locks.decide(&mut turn, task.found(read), NOW, &mut effects);
        if task.purpose == Purpose::Command {
            locks.client_gone(1, NOW, &mut effects);
        }
    }
    assert_eq!(purposes, [Purpose::Command, Purpose::Holders]);
    let client = BlockedClient {
        handle: 2,
        client_id: 5,
    };
    let joined = locks.enqueue(&mut turn, Some(client), NOW, &mut effects);
    assert!(joined.is_some(), "{:?}", turn.outcome());
    let (_, effects) = fires(&mut locks, NOW, |task| match task.purpose {
        Purpose::Release(_) => Read::One(&own),
        _ => Read::One(&Stored::Free),
    });
    assert!(effects.iter().any(is_grant), "{effects:?}");
}

/// Bob waits while others have written over his session's hold, which then is to end. It might end
/// the hold that he waits for.
#[test]
fn a_waiter_whose_former_hold_is_about_to_end_is_not_granted_before_that() {
    let (mut locks, _, _) = session_with(&[("k bob 1000 SESSION s", Stored::Free)]);
    waits(&mut locks, "k bob 1000 BLOCK 0", 1, &held_until(END));
    locks.client_gone(1, NOW, &mut Vec::new());
    let release = Release::parse(words("k alice")).unwrap();
    let turn = Turn::of(Command::Release(&release), 0, 10).with_budget(0);
    let (purposes, effects) = runs(&mut locks, turn, &owned_by(Token::new(7).unwrap()));
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
