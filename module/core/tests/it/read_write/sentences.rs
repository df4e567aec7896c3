//! The contract's own sentences, each as the shortest history in which it matters.

use crate::foreign::Change;
use crate::keyspace::{Place, Reading, timeout_key};
use crate::life::{News, TwinEvent};
use crate::twin::{Reply, Waits};
use crate::world::{Interruption, Named, OWNERS, Op, World, place};
use rlock_core::Mode::{self, Plain, Read, Write};

const A: usize = 0;
const B: usize = 1;
const C: usize = 2;
const FOREVER: Waits = Waits::Block(0);

/// A server in which every step is compared with the twin as well.
struct Server(World);

impl Server {
    fn new() -> Self {
        Self(World::new(Reading::All))
    }

    fn does(&mut self, op: &Op) -> Reply {
        self.0.step(op).unwrap_or_else(|wrong| panic!("{wrong}"))
    }

    fn acquires(&mut self, owner: usize, mode: Mode, lease_ms: i64, waits: Waits) -> Reply {
        self.does(&acquire(owner, mode, lease_ms, waits))
    }

    /// The token of a hold that is had at once.
    fn takes(&mut self, owner: usize, mode: Mode, lease_ms: i64) -> i64 {
        match self.acquires(owner, mode, lease_ms, Waits::No) {
            Reply::Held { token, .. } => token,
            other => panic!("{other:?}"),
        }
    }

    fn takes_once(&mut self, owner: usize, mode: Mode, lease_ms: i64) -> Reply {
        let mut op = acquire(owner, mode, lease_ms, Waits::No);
        if let Op::Acquire { once, .. } = &mut op {
            *once = true;
        }
        self.does(&op)
    }

    fn waits(&mut self, owner: usize, mode: Mode) {
        assert_eq!(self.acquires(owner, mode, 50, FOREVER), Reply::Waits);
    }

    fn releases(&mut self, owner: usize, mode: Mode) -> Reply {
        self.releases_with(owner, mode, Named::No, None)
    }

    fn releases_with(
        &mut self,
        owner: usize,
        mode: Mode,
        token: Named,
        lease_ms: Option<i64>,
    ) -> Reply {
        self.does(&Op::Release {
            lock: 0,
            owner,
            mode,
            token,
            lease_ms,
        })
    }

    fn renews(&mut self, owner: usize, mode: Mode, lease_ms: i64) -> Reply {
        self.does(&Op::Renew {
            lock: 0,
            owner,
            mode,
            lease_ms,
            token: Named::No,
            session: None,
        })
    }

    fn sees(&mut self, changes: &[Change]) {
        self.does(&Op::Foreign {
            lock: 0,
            changes: changes.to_vec(),
            told: true,
        });
    }

    /// The same, and no event says so.
    fn overlooks(&mut self, changes: &[Change]) {
        self.does(&Op::Foreign {
            lock: 0,
            changes: changes.to_vec(),
            told: false,
        });
    }

    fn passes(&mut self, ms: i64) {
        self.does(&Op::Pass { ms });
    }

    fn holds(&self, owner: usize, mode: Mode) -> bool {
        self.0.twin.holds(&place(0), OWNERS[owner], mode)
    }

    fn line(&self) -> Vec<(&[u8], Mode)> {
        let line = self.0.line(0).iter();
        line.map(|waiter| (&*waiter.owner, waiter.mode)).collect()
    }

    fn left(&self, key: &Place) -> i64 {
        let end = self.0.space().get(key).and_then(|entry| entry.ends_at);
        end.map_or(-1, |end| end - self.0.now().wall_ms())
    }

    fn lease_left(&self) -> i64 {
        self.left(&place(0))
    }

    fn timeout_left(&self, owner: usize, number: i64) -> i64 {
        self.left(&timeout_key(&place(0), OWNERS[owner], number))
    }

    fn events(&mut self, session: usize, grace_ms: i64) -> Vec<TwinEvent> {
        let client = session;
        let op = Op::Events {
            session,
            client,
            block_ms: None,
            grace_ms,
            epoch: None,
            after: None,
        };
        match self.does(&op) {
            Reply::Events(mut told) => told.remove(0).events,
            other => panic!("{other:?}"),
        }
    }
}

fn acquire(owner: usize, mode: Mode, lease_ms: i64, waits: Waits) -> Op {
    Op::Acquire {
        lock: 0,
        owner,
        mode,
        lease_ms,
        waits,
        session: None,
        once: false,
    }
}

fn of_session(owner: usize, mode: Mode, lease_ms: i64, waits: Waits) -> Op {
    let mut op = acquire(owner, mode, lease_ms, waits);
    if let Op::Acquire { session, .. } = &mut op {
        *session = Some(0);
    }
    op
}

fn code(reply: Reply) -> String {
    match reply {
        Reply::Refused(text) => text.split(' ').next().unwrap_or_default().into(),
        other => panic!("{other:?}"),
    }
}

// --- Queue ---------------------------------------------------------------------------------------

#[test]
fn readers_wait_behind_a_waiting_writer_and_come_in_together() {
    let mut server = Server::new();
    server.takes(A, Read, 50);
    server.waits(B, Write);
    let ttl_ms = 50;
    assert_eq!(
        server.acquires(C, Read, 9, Waits::No),
        Reply::NotHeld { ttl_ms }
    );
    server.waits(C, Read);
    // An owner that holds re-enters past the queue.
    assert!(matches!(
        server.acquires(A, Read, 50, Waits::No),
        Reply::Held { count: 2, .. }
    ));
    assert_eq!(server.releases(A, Read), Reply::Number(1));
    assert_eq!(server.releases(A, Read), Reply::Number(0));
    assert!(server.holds(B, Write) && !server.holds(C, Read));
    server.waits(A, Read);
    assert_eq!(server.releases(B, Write), Reply::Number(0));
    assert!(server.holds(A, Read) && server.holds(C, Read));
}

#[test]
fn a_writer_gets_its_turn_among_readers_without_end() {
    let mut server = Server::new();
    server.takes(A, Read, 50);
    server.waits(B, Write);
    for turn in 0..6 {
        let (comes, goes) = if turn % 2 == 0 { (C, A) } else { (A, C) };
        server.waits(comes, Read);
        server.releases(goes, Read);
        if server.holds(B, Write) {
            return;
        }
    }
    panic!("the writer starves");
}

#[test]
fn when_a_waiting_writer_leaves_those_it_held_up_come_in() {
    let leaves: [fn(&mut Server); 3] = [
        |server| {
            server.does(&Op::Cancel {
                lock: 0,
                owner: B,
                mode: None,
            });
        },
        |server| {
            server.does(&Op::Disconnect { client: 0 });
        },
        |server| server.passes(9),
    ];
    for leave in leaves {
        let mut server = Server::new();
        server.takes(A, Read, 50);
        let waits = server.acquires(B, Write, 9, Waits::Block(9));
        assert_eq!(waits, Reply::Waits);
        server.waits(C, Read);
        leave(&mut server);
        assert!(server.holds(C, Read) && server.line().is_empty());
    }
}

#[test]
fn a_writer_reads_past_the_line_and_becomes_a_reader() {
    let mut server = Server::new();
    server.takes(A, Write, 50);
    server.waits(B, Read);
    server.waits(C, Write);
    server.takes(A, Read, 80);
    assert!(!server.holds(B, Read));
    // Readers that the writer held up are granted at once, and the next writer is not.
    assert_eq!(server.releases(A, Write), Reply::Number(0));
    assert!(server.holds(A, Read) && server.holds(B, Read) && !server.holds(C, Write));
    assert_eq!(server.releases(A, Read), Reply::Number(0));
    assert_eq!(server.releases(B, Read), Reply::Number(0));
    assert!(server.holds(C, Write));
}

#[test]
fn a_reader_that_would_wait_for_write_waits_for_itself() {
    let mut server = Server::new();
    server.takes(A, Read, 50);
    assert_eq!(server.acquires(A, Write, 9, FOREVER), Reply::Deadlock);
    let ttl_ms = 50;
    assert_eq!(
        server.acquires(A, Write, 9, Waits::No),
        Reply::NotHeld { ttl_ms }
    );
    // Also when its own READ waits before it.
    server.waits(B, Write);
    server.waits(C, Read);
    assert_eq!(server.acquires(C, Write, 9, FOREVER), Reply::Deadlock);
    // The other way round it is no circle, but a second wait.
    assert_eq!(code(server.acquires(B, Read, 9, FOREVER)), "WAITING");
    assert_eq!(server.0.counters().deadlocks_refused, 2);
}

#[test]
fn once_looks_at_holds_and_waits_of_the_mode_named() {
    let mut server = Server::new();
    server.takes(A, Write, 50);
    assert!(matches!(
        server.takes_once(A, Write, 50),
        Reply::Held { count: 1, .. }
    ));
    assert!(matches!(
        server.takes_once(A, Read, 50),
        Reply::Held { count: 1, .. }
    ));
    assert!(matches!(
        server.takes_once(A, Read, 50),
        Reply::Held { count: 1, .. }
    ));
    let again = |mode| {
        let mut again = acquire(B, mode, 50, FOREVER);
        if let Op::Acquire { once, .. } = &mut again {
            *once = true;
        }
        again
    };
    for (mode, other) in [(Write, Read), (Read, Write)] {
        server.waits(B, mode);
        assert_eq!(server.does(&again(mode)), Reply::Waits);
        assert_ne!(server.does(&again(other)), Reply::Waits);
        assert_eq!(server.line(), [(OWNERS[B], mode)]);
        // CANCEL takes either mode, or only the one that it names.
        let cancels = |mode| Op::Cancel {
            lock: 0,
            owner: B,
            mode,
        };
        for (named, left) in [(Some(other), 0), (Some(mode), 1), (None, 0)] {
            assert_eq!(server.does(&cancels(named)), Reply::Number(left));
        }
        server.waits(B, mode);
        assert_eq!(server.does(&cancels(None)), Reply::Number(1));
    }
}

#[test]
fn nobody_stands_in_a_queue_twice() {
    // There are fewer owners here than may wait for a lock: see the commands' own tests.
    let mut server = Server::new();
    server.takes(A, Write, 50);
    server.waits(B, Write);
    assert_eq!(code(server.acquires(B, Read, 9, FOREVER)), "WAITING");
    server.waits(C, Read);
    assert_eq!(server.line(), [(OWNERS[B], Write), (OWNERS[C], Read)]);
}

#[test]
fn a_circle_through_both_kinds_is_refused() {
    let on = |lock, op: Op| match op {
        Op::Acquire {
            owner,
            mode,
            lease_ms,
            waits,
            session,
            once,
            ..
        } => Op::Acquire {
            lock,
            owner,
            mode,
            lease_ms,
            waits,
            session,
            once,
        },
        other => other,
    };
    for of_reader in [Read, Write] {
        let mut server = Server::new();
        server.takes(A, of_reader, 50);
        server.does(&on(1, acquire(B, Plain, 50, Waits::No)));
        let wait = if of_reader == Read { Write } else { Read };
        server.waits(B, wait);
        let closes = on(1, acquire(A, Plain, 50, FOREVER));
        assert_eq!(server.does(&closes), Reply::Deadlock);
        // When the wait has left there is no circle.
        server.does(&Op::Cancel {
            lock: 0,
            owner: B,
            mode: None,
        });
        assert_eq!(server.does(&closes), Reply::Waits);
    }
    // A reader held up by a waiting writer alone waits for the holders that the writer waits for.
    let mut server = Server::new();
    server.takes(A, Read, 50);
    server.does(&on(1, acquire(C, Plain, 50, Waits::No)));
    server.waits(B, Write);
    server.waits(C, Read);
    let closes = on(1, acquire(A, Plain, 50, FOREVER));
    assert_eq!(server.does(&closes), Reply::Deadlock);
}

// --- Kind ----------------------------------------------------------------------------------------

#[test]
fn the_other_kind_is_refused() {
    for (of_holder, others) in [
        (Plain, [Read, Write]),
        (Read, [Plain; 2]),
        (Write, [Plain; 2]),
    ] {
        let mut server = Server::new();
        server.takes(A, of_holder, 50);
        for mode in others {
            assert_eq!(code(server.acquires(B, mode, 9, FOREVER)), "WRONGKIND");
            assert_eq!(code(server.acquires(A, mode, 9, Waits::No)), "WRONGKIND");
            assert_eq!(code(server.releases(A, mode)), "WRONGKIND");
            assert_eq!(code(server.renews(A, mode, 9)), "WRONGKIND");
        }
    }
}

#[test]
fn a_script_may_change_the_kind_and_those_in_line_stay() {
    let mut server = Server::new();
    server.takes(A, Write, 50);
    server.waits(B, Read);
    let lease_ms = Some(20);
    server.sees(&[Change::Take { owner: C, lease_ms }]);
    assert_eq!(server.line(), [(OWNERS[B], Read)]);
    // The kind is the holder's, not that of the waiters.
    assert_eq!(code(server.acquires(A, Read, 9, FOREVER)), "WRONGKIND");
    assert_eq!(server.acquires(A, Plain, 9, FOREVER), Reply::Waits);
    assert_eq!(server.releases(C, Plain), Reply::Number(0));
    // Now the first in the queue has the lock; the other kind waits on behind it.
    assert!(server.holds(B, Read));
    assert_eq!(server.line(), [(OWNERS[A], Plain)]);
    server.releases(B, Read);
    assert!(server.holds(A, Plain));
}

#[test]
fn overwritten_by_another_type_the_waiters_hear_so() {
    let mut server = Server::new();
    server.takes(A, Read, 50);
    server.waits(B, Write);
    server.waits(C, Read);
    server.sees(&[Change::SetText]);
    assert!(server.line().is_empty());
    assert_eq!(code(server.acquires(A, Read, 9, FOREVER)), "WRONGTYPE");
}

// --- Leases --------------------------------------------------------------------------------------

#[test]
fn a_reader_has_one_timeout_key_with_the_longest_lease() {
    let mut server = Server::new();
    server.takes(A, Read, 50);
    server.takes(A, Read, 20);
    let lefts = |server: &Server| [1, 2].map(|number| server.timeout_left(A, number));
    // READ shortens neither the reader's lease nor the hash's.
    assert_eq!((lefts(&server), server.lease_left()), ([-1, 50], 50));
    server.takes(A, Read, 60);
    assert_eq!((lefts(&server), server.timeout_left(A, 3)), ([-1, -1], 60));
    // Nor does RELEASE.
    assert_eq!(server.releases(A, Read), Reply::Number(2));
    assert_eq!((lefts(&server), server.lease_left()), ([-1, 60], 60));
    assert_eq!(server.renews(A, Read, 30), Reply::Number(1));
    assert_eq!((lefts(&server), server.lease_left()), ([-1, 30], 30));
    server.takes_once(A, Read, 70);
    assert_eq!((lefts(&server), server.lease_left()), ([-1, 70], 70));
    server.takes(B, Read, 40);
    // With holds left, LEASE is their lease, and the hash shrinks with it.
    let left = server.releases_with(A, Read, Named::No, Some(10));
    assert_eq!(left, Reply::Number(1));
    assert_eq!((lefts(&server), server.lease_left()), ([10, -1], 40));
    assert_eq!(server.releases(B, Read), Reply::Number(0));
    assert_eq!(server.lease_left(), 10);
}

#[test]
fn the_longest_lease_of_a_reader_outlives_the_release_of_its_entry() {
    let mut server = Server::new();
    server.takes(A, Read, 5);
    server.takes(A, Read, 50);
    server.takes(B, Read, 90);
    server.passes(6);
    assert_eq!(server.releases(A, Read), Reply::Number(1));
    assert_eq!(server.timeout_left(A, 1), 44);
    server.passes(45);
    assert_eq!(server.releases(A, Read), Reply::Null);
}

#[test]
fn a_writers_lease_starts_anew_and_is_never_below_its_own_reading() {
    let mut server = Server::new();
    server.takes(A, Write, 50);
    server.takes(A, Write, 20);
    assert_eq!(server.lease_left(), 20);
    server.takes(A, Read, 40);
    assert_eq!(server.lease_left(), 40);
    assert_eq!(server.renews(A, Write, 10), Reply::Number(1));
    assert_eq!(server.lease_left(), 40);
    assert_eq!(server.renews(A, Write, 80), Reply::Number(1));
    let left = server.releases_with(A, Write, Named::No, Some(60));
    assert_eq!((left, server.lease_left()), (Reply::Number(1), 60));
    // The downgrade shrinks it to the reader's lease.
    assert_eq!(server.releases(A, Write), Reply::Number(0));
    assert_eq!(server.lease_left(), 40);
}

#[test]
fn a_reader_with_no_live_timeout_key_holds_nothing() {
    let mut server = Server::new();
    let before = server.takes(A, Read, 5);
    server.takes(A, Read, 5);
    server.takes(B, Read, 50);
    server.passes(6);
    assert_eq!(server.releases(A, Read), Reply::Null);
    assert_eq!(server.renews(A, Read, 50), Reply::Number(0));
    let again = server.acquires(A, Read, 50, Waits::No);
    assert!(matches!(again, Reply::Held { count: 1, token } if token > before));
    // With nobody but such readers left the lock is free.
    server.takes(B, Read, 90);
    let deleted = [1, 2].map(|number| Change::DeleteTimeout { owner: B, number });
    server.sees(&deleted);
    server.sees(&[Change::DeleteTimeout {
        owner: A,
        number: 1,
    }]);
    server.takes(C, Write, 9);
}

#[test]
fn a_waiting_writer_is_granted_when_the_last_timeout_key_ends() {
    let mut server = Server::new();
    server.takes(A, Read, 30);
    server.takes(B, Read, 10);
    server.waits(C, Write);
    // Others made the hash last longer than anybody in it.
    server.sees(&[Change::Expire { ms: 500 }]);
    server.passes(30);
    assert!(!server.holds(C, Write));
    server.passes(1);
    assert!(server.holds(C, Write));
}

/// The queue learns of the earlier end.
#[test]
fn a_waiting_writer_is_granted_when_a_lease_ends_that_once_made_shorter() {
    let mut server = Server::new();
    server.takes(A, Read, 500);
    server.waits(C, Write);
    server.takes_once(A, Read, 30);
    server.passes(31);
    assert!(server.holds(C, Write));
}

#[test]
fn so_is_a_waiter_of_the_plain_lock_that_a_script_made_one_of_readers() {
    let mut server = Server::new();
    let lease_ms = Some(500);
    server.sees(&[Change::Take { owner: A, lease_ms }]);
    server.waits(C, Plain);
    let (owner, lease_ms) = (B, 9);
    server.sees(&[Change::Read { owner, lease_ms }, Change::Persist]);
    server.passes(9);
    assert_eq!(server.line(), [(OWNERS[C], Plain)]);
    server.passes(1);
    assert!(server.holds(C, Plain));
}

#[test]
fn redisson_may_cut_the_hash_short() {
    let mut server = Server::new();
    server.takes(A, Read, 70);
    server.takes(B, Read, 10);
    server.waits(C, Write);
    server.sees(&[Change::RenewRead { owner: B }]);
    server.passes(31);
    assert!(server.holds(C, Write));
}

#[test]
fn after_redissons_downgrade_the_last_readers_end_counts() {
    let mut server = Server::new();
    server.sees(&[
        Change::Write {
            owner: C,
            lease_ms: 70,
        },
        Change::Read {
            owner: C,
            lease_ms: 1,
        },
    ]);
    let waits = server.acquires(B, Read, 1, FOREVER);
    assert_eq!(waits, Reply::Waits);
    server.waits(A, Write);
    server.sees(&[Change::Unwrite { owner: C }]);
    assert!(server.holds(B, Read));
    server.passes(2);
    assert!(server.holds(A, Write));
}

#[test]
fn once_with_a_shorter_lease_lets_the_next_in_earlier() {
    let mut server = Server::new();
    server.takes(A, Read, 800);
    server.waits(B, Write);
    server.takes_once(A, Read, 5);
    assert_eq!(server.lease_left(), 5);
    server.passes(6);
    assert!(server.holds(B, Write));
}

#[test]
fn a_timeout_key_without_an_end_holds_no_lease_back() {
    let mut server = Server::new();
    server.takes(B, Read, 9);
    server.sees(&[Change::PersistTimeout {
        owner: B,
        number: 1,
    }]);
    server.takes(A, Read, 40);
    assert_eq!(server.lease_left(), 40);
}

#[test]
fn nor_does_one_of_its_own() {
    let mut server = Server::new();
    server.takes(A, Read, 9);
    server.sees(&[Change::PersistTimeout {
        owner: A,
        number: 1,
    }]);
    server.takes(A, Read, 40);
    assert_eq!(server.lease_left(), 40);
}

#[test]
fn a_sessions_hold_with_an_endless_timeout_key_is_lost_with_its_hash() {
    let owner = A;
    for releases in [false, true] {
        let mut server = Server::new();
        server.takes(A, Read, 50);
        server.sees(&[Change::PersistTimeout { owner, number: 1 }]);
        server.does(&Op::Events {
            session: 0,
            client: 0,
            block_ms: None,
            grace_ms: 20,
            epoch: None,
            after: None,
        });
        let mut enters = acquire(A, Read, 50, Waits::No);
        if let Op::Acquire { session, .. } = &mut enters {
            *session = Some(0);
        }
        // The world sees that the timer is set for the end of the hash.
        server.does(&enters);
        if releases {
            server.releases(A, Read);
        }
        server.passes(51);
        assert!(!server.holds(A, Read));
    }
}

#[test]
fn a_reader_without_an_end_reads_on_after_one_of_its_releases() {
    let mut server = Server::new();
    server.takes(A, Read, 50);
    server.takes(A, Read, 50);
    let (owner, number) = (A, 2);
    server.sees(&[Change::PersistTimeout { owner, number }, Change::Persist]);
    assert_eq!(server.releases(A, Read), Reply::Number(1));
    server.passes(1000);
    assert!(server.holds(A, Read));
    assert_eq!(server.renews(A, Read, 9), Reply::Number(1));
    assert_eq!(server.lease_left(), 9);
}

#[test]
fn a_renewal_gives_a_scripts_reader_a_token_and_cuts_all_its_entries_short() {
    let mut server = Server::new();
    let (owner, lease_ms) = (A, 70);
    server.sees(&[Change::Read { owner, lease_ms }]);
    server.sees(&[Change::Read { owner, lease_ms }]);
    server.takes(B, Read, 90);
    assert_eq!(server.renews(A, Read, 9), Reply::Number(1));
    server.passes(9);
    assert!(server.holds(A, Read));
    assert_eq!(server.releases(B, Read), Reply::Number(0));
    assert_eq!(server.lease_left(), 0);
}

#[test]
fn two_writers_in_a_hash_do_not_cut_each_other_short() {
    let mut server = Server::new();
    server.takes(A, Write, 50);
    server.sees(&[Change::AddWriter { owner: B }]);
    assert_eq!(server.renews(A, Write, 10), Reply::Number(1));
    assert_eq!(server.lease_left(), 50);
}

#[test]
fn when_the_last_reader_beside_a_scripts_writer_goes_the_line_is_looked_at() {
    let mut server = Server::new();
    server.takes(C, Read, 50);
    server.waits(B, Write);
    let (owner, value) = (B, "1");
    server.does(&Op::Foreign {
        lock: 0,
        changes: vec![Change::SetWriteCount { owner, value }],
        told: false,
    });
    assert_eq!(server.line(), [(OWNERS[B], Write)]);
    // An owner re-enters its own hold, and never waits for it.
    server.releases(C, Read);
    assert_eq!(server.line(), []);
}

#[test]
fn break_deletes_the_timeout_keys_and_a_rename_leaves_them_behind() {
    let mut server = Server::new();
    server.takes(A, Read, 50);
    server.takes(B, Read, 50);
    assert_eq!(server.does(&Op::Break { lock: 0 }), Reply::Number(1));
    assert_eq!(server.does(&Op::Break { lock: 0 }), Reply::Number(0));
    assert_eq!(server.0.space().entries().count(), 0);
    server.takes(A, Read, 50);
    server.sees(&[Change::Rename]);
    assert_eq!(server.timeout_left(A, 1), 50);
    assert_eq!(server.releases(A, Read), Reply::Null);
    assert!(!server.0.twin.holds(&place(1), OWNERS[A], Read));
}

#[test]
fn counts_have_an_end() {
    let mut server = Server::new();
    server.takes(A, Read, 50);
    server.takes(B, Read, 50);
    let change = |value| Change::SetCount { owner: A, value };
    server.sees(&[change("2147483647")]);
    assert_eq!(code(server.acquires(A, Read, 9, Waits::No)), "ERR");
    server.sees(&[change("none")]);
    assert_eq!(code(server.acquires(A, Read, 9, Waits::No)), "ERR");
    assert_eq!(code(server.releases(A, Read)), "ERR");
    server.sees(&[Change::Delete]);
    server.takes(A, Write, 50);
    let value = "2147483647";
    server.sees(&[Change::SetWriteCount { owner: A, value }]);
    assert_eq!(code(server.acquires(A, Write, 9, Waits::No)), "ERR");
    assert!(matches!(server.takes_once(A, Write, 9), Reply::Held { .. }));
}

// --- Tokens --------------------------------------------------------------------------------------

#[test]
fn every_grant_mints_a_token_and_a_hold_keeps_its_own() {
    let mut server = Server::new();
    let first = server.takes(A, Read, 50);
    assert_eq!(server.takes(A, Read, 50), first);
    let second = server.takes(B, Read, 50);
    assert!(second > first);
    assert_eq!(
        server.releases_with(B, Read, Named::Stale, None),
        Reply::Null
    );
    assert_eq!(
        server.releases_with(B, Read, Named::Present, None),
        Reply::Number(0)
    );
    server.releases(A, Read);
    assert_eq!(server.releases(A, Read), Reply::Number(0));
    let third = server.takes(A, Write, 50);
    assert!(third > second);
    assert!(server.takes(A, Read, 50) > third);
    assert_eq!(server.takes(A, Write, 50), third);
}

#[test]
fn a_reader_of_redisson_has_no_token_until_it_enters_again() {
    let mut server = Server::new();
    server.sees(&[Change::Read {
        owner: A,
        lease_ms: 50,
    }]);
    assert_eq!(
        server.releases_with(A, Read, Named::Present, None),
        Reply::Null
    );
    let minted = server.takes(A, Read, 50);
    assert_eq!(server.takes(A, Read, 50), minted);
    assert_eq!(server.releases(A, Read), Reply::Number(2));
}

#[test]
fn after_a_failover_a_writers_token_is_the_same() {
    let mut server = Server::new();
    let before = server.takes(A, Write, 50);
    server.does(&Op::Failover { guard_ms: 10_000 });
    assert_eq!(server.takes(A, Write, 50), before);
    let left = server.releases_with(A, Write, Named::Present, None);
    assert_eq!(left, Reply::Number(1));
}

#[test]
fn a_scripts_writer_gets_a_token_when_it_enters_again() {
    for once in [false, true] {
        let mut server = Server::new();
        let lease_ms = 50;
        server.sees(&[Change::Write { owner: A, lease_ms }]);
        assert_eq!(server.renews(A, Write, 50), Reply::Number(1));
        assert_eq!(server.0.twin.token(&place(0), OWNERS[A], Write), None);
        let mut again = acquire(A, Write, 50, Waits::No);
        if let Op::Acquire { once: its, .. } = &mut again {
            *its = once;
        }
        let Reply::Held { count, token } = server.does(&again) else {
            panic!("it is its own")
        };
        assert_eq!(count, if once { 1 } else { 2 });
        assert_eq!(server.takes(A, Write, 50), token);
        let left = server.releases_with(A, Write, Named::Present, None);
        assert_eq!(left, Reply::Number(count));
    }
}

#[test]
fn a_writers_token_is_known_for_as_long_as_it_has_the_lock() {
    let mut server = Server::new();
    let token = server.takes(A, Write, 1);
    // Its reading makes the hash last longer, and that is the writer's lease.
    server.takes(A, Read, 50);
    server.passes(2);
    assert_eq!(server.takes(A, Write, 50), token);
    let left = server.releases_with(A, Write, Named::Present, None);
    assert_eq!(left, Reply::Number(1));
}

#[test]
fn another_writer_in_the_hash_takes_no_token_with_it() {
    let mut server = Server::new();
    let token = server.takes(A, Write, 50);
    server.overlooks(&[Change::AddWriter { owner: B }]);
    assert_eq!(server.releases(B, Write), Reply::Number(0));
    assert_eq!(server.takes(A, Write, 50), token);
}

// --- Sessions ------------------------------------------------------------------------------------

#[test]
fn holds_of_both_modes_end_with_their_session() {
    let mut server = Server::new();
    server.events(0, 0);
    server.does(&of_session(A, Write, 50, Waits::No));
    server.does(&of_session(A, Read, 50, Waits::No));
    server.waits(B, Write);
    server.does(&Op::Close { client: 0 });
    assert!(server.holds(B, Write) && !server.holds(A, Read));
    assert_eq!(server.0.counters().session_releases, 2);
}

#[test]
fn who_reads_anew_has_lost_what_its_session_had_and_nobody_had_noticed() {
    let mut server = Server::new();
    server.events(0, 0);
    server.takes(B, Read, 50);
    server.does(&of_session(A, Read, 50, Waits::No));
    let (owner, number) = (A, 1);
    server.does(&Op::Foreign {
        lock: 0,
        changes: vec![Change::DeleteTimeout { owner, number }],
        told: false,
    });
    server.takes(A, Read, 50);
    let lost: Vec<News> = server.events(0, 0).into_iter().map(|of| of.news).collect();
    assert_eq!(lost, [News::Lost("deleted")]);
    server.does(&Op::Close { client: 0 });
    assert!(server.holds(A, Read));
}

#[test]
fn a_reading_keeps_its_token_beneath_a_scripts_entries() {
    let mut server = Server::new();
    server.events(0, 0);
    server.does(&of_session(A, Read, 50, Waits::No));
    let (owner, lease_ms) = (A, 50);
    let token = server.takes(A, Read, 50);
    server.sees(&[Change::Read { owner, lease_ms }]);
    server.sees(&[Change::Read { owner, lease_ms }]);
    assert_eq!(server.takes(A, Read, 50), token);
    assert_eq!(server.releases(A, Read), Reply::Number(4));
    server.sees(&[Change::Unread { owner }]);
    assert_eq!(server.releases(A, Read), Reply::Number(2));
    assert_eq!(server.releases(A, Read), Reply::Number(1));
    server.sees(&[Change::Expire { ms: 50 }]);
    assert_eq!(server.events(0, 0), []);
}

#[test]
fn a_reading_is_lost_at_its_own_end() {
    let mut server = Server::new();
    server.events(0, 0);
    server.does(&of_session(A, Read, 10, Waits::No));
    server.takes(B, Read, 50);
    server.passes(10);
    assert_eq!(server.events(0, 0), []);
    server.passes(1);
    let lost: Vec<News> = server.events(0, 0).into_iter().map(|of| of.news).collect();
    assert_eq!(lost, [News::Lost("expired")]);
}

#[test]
fn a_reading_with_another_token_is_another_one() {
    let mut server = Server::new();
    server.events(0, 0);
    server.does(&of_session(A, Read, 50, Waits::No));
    server.sees(&[Change::SetTimeout {
        owner: A,
        number: 1,
        value: "77",
        ms: 50,
    }]);
    let lost: Vec<News> = server.events(0, 0).into_iter().map(|of| of.news).collect();
    assert_eq!(lost, [News::Lost("deleted")]);
}

#[test]
fn a_scripts_hold_is_not_lost_when_another_in_the_hash_gets_a_token() {
    let mut server = Server::new();
    server.events(0, 0);
    let (owner, lease_ms, value) = (A, Some(50), "1");
    server.sees(&[
        Change::Take { owner, lease_ms },
        Change::SetCount { owner: C, value },
    ]);
    let bound = Op::Renew {
        lock: 0,
        owner,
        mode: Plain,
        lease_ms: 50,
        token: Named::No,
        session: Some(0),
    };
    assert_eq!(server.does(&bound), Reply::Number(1));
    server.takes(C, Plain, 50);
    server.sees(&[Change::Expire { ms: 50 }]);
    assert_eq!(server.events(0, 0), []);
}

/// The next in the queue need not wait until somebody looks again.
#[test]
fn two_waiting_writers_whom_a_script_makes_holders_are_both_told() {
    let mut server = Server::new();
    server.takes(A, Write, 50);
    server.does(&acquire(B, Write, 50, Waits::Block(0)));
    server.does(&acquire(C, Write, 50, Waits::Block(1)));
    server.sees(&[
        Change::ForceUnwrite,
        Change::Write {
            owner: B,
            lease_ms: 50,
        },
        Change::AddWriter { owner: C },
    ]);
    assert!(server.holds(B, Write) && server.holds(C, Write));
    assert_eq!(server.0.counters().wait_ms.count(), 2);
}

#[test]
fn a_writers_token_ends_with_its_hold() {
    let mut server = Server::new();
    let before = server.takes(A, Write, 50);
    server.releases(A, Write);
    let lease_ms = 50;
    server.sees(&[Change::Write { owner: A, lease_ms }]);
    assert!(server.takes(A, Write, 50) > before);
}

/// A script's hold of the same owner, which happens to end in the same millisecond, is another.
#[test]
fn a_writers_token_is_not_that_of_a_scripts_later_hold() {
    let lease_ms = 50;
    let of_script = [Change::Write { owner: A, lease_ms }];
    let released: fn(&mut Server) = |server| {
        server.releases(A, Write);
    };
    let broken: fn(&mut Server) = |server| {
        server.does(&Op::Break { lock: 0 });
    };
    let taken_by_another: fn(&mut Server) = |server| {
        server.overlooks(&[Change::Delete]);
        server.takes(B, Read, 50);
        server.releases(B, Read);
    };
    for ends in [released, broken, taken_by_another] {
        let mut server = Server::new();
        let before = server.takes(A, Write, lease_ms);
        ends(&mut server);
        server.overlooks(&of_script);
        assert!(server.takes(A, Write, lease_ms) > before);
    }
}

/// Of readers that never release the fields do not stay for as long as others read.
#[test]
fn the_timer_removes_readers_without_a_lease() {
    let mut server = Server::new();
    server.takes(A, Read, 100_000);
    server.takes(B, Read, 1);
    server.passes(2);
    let is_there = |server: &Server| server.0.space().field(&place(0), OWNERS[B]).is_some();
    assert!(is_there(&server));
    for _ in 0..1024 {
        server.takes(C, Read, 50);
        server.releases(C, Read);
    }
    assert!(!is_there(&server));
}

/// An owner re-enters its own hold, and never waits for it, even if it waited there already.
#[test]
fn a_waiter_whom_a_script_lets_read_waits_for_nobody_ahead_of_it() {
    let mut server = Server::new();
    server.takes(A, Read, 50);
    server.waits(B, Write);
    server.waits(C, Read);
    let (owner, lease_ms) = (C, 9);
    for lock in 0..2 {
        server.does(&Op::Foreign {
            lock,
            changes: vec![Change::Read { owner, lease_ms }],
            told: true,
        });
    }
    let wait = server.does(&Op::Acquire {
        lock: 1,
        owner: B,
        mode: Write,
        lease_ms: 50,
        waits: FOREVER,
        session: None,
        once: false,
    });
    assert_eq!(wait, Reply::Waits);
}

/// A writer whose two sessions die in one packet is gone, and one waiter is let in.
#[test]
fn writing_and_reading_under_two_sessions_end_together() {
    for closed in [[0, 1], [1, 0]] {
        let mut server = Server::new();
        for (session, mode) in [(0, Write), (1, Read)] {
            let client = session;
            server.does(&Op::Events {
                session,
                client,
                block_ms: None,
                grace_ms: 0,
                epoch: None,
                after: None,
            });
            server.does(&Op::Acquire {
                lock: 0,
                owner: A,
                mode,
                lease_ms: 50,
                waits: Waits::No,
                session: Some(session),
                once: false,
            });
        }
        server.waits(B, Write);
        server.waits(C, Write);
        server.does(&Op::Multi);
        server.does(&Op::Interrupt {
            reads: 1,
            by: Interruption::Timer,
        });
        for client in closed {
            server.does(&Op::Close { client });
        }
        server.does(&Op::Exec);
        assert!(server.holds(B, Write) && !server.holds(A, Read));
        assert_eq!(server.line(), [(OWNERS[C], Write)]);
    }
}

/// A session's hold whose key may have changed is looked at when all has ended that must end there.
#[test]
fn a_hold_is_looked_at_after_what_ends_beside_it() {
    let mut server = Server::new();
    for (session, mode) in [(0, Write), (1, Read)] {
        let client = session;
        server.does(&Op::Events {
            session,
            client,
            block_ms: None,
            grace_ms: 0,
            epoch: None,
            after: None,
        });
        server.does(&Op::Acquire {
            lock: 0,
            owner: A,
            mode,
            lease_ms: 50,
            waits: Waits::No,
            session: Some(session),
            once: false,
        });
    }
    server.does(&Op::Multi);
    server.does(&Op::Close { client: 0 });
    server.sees(&[Change::RenewRead { owner: C }]);
    server.does(&Op::Exec);
    assert!(server.holds(A, Read) && !server.holds(A, Write));
}

// --- The delay after a start ---------------------------------------------------------------------

/// A server that has started, with its loaded data.
fn started(server: &mut Server, delay_ms: i64) {
    server.does(&Op::Start { delay_ms });
}

#[test]
fn during_the_delay_nobody_is_granted_a_free_lock() {
    for mode in [Plain, Read, Write] {
        let mut server = Server::new();
        started(&mut server, 100);
        let refused = |ttl_ms| Reply::NotHeld { ttl_ms };
        assert_eq!(server.acquires(A, mode, 50, Waits::No), refused(100));
        server.passes(99);
        assert_eq!(server.acquires(A, mode, 50, Waits::No), refused(1));
        server.passes(1);
        server.takes(A, mode, 50);
    }
}

#[test]
fn those_who_wait_for_the_end_of_the_delay_are_granted_in_order() {
    for mode in [Plain, Write] {
        let mut server = Server::new();
        started(&mut server, 100);
        server.waits(B, mode);
        server.waits(A, mode);
        server.passes(99);
        assert_eq!(server.line(), [(OWNERS[B], mode), (OWNERS[A], mode)]);
        server.passes(1);
        assert!(server.holds(B, mode));
        assert_eq!(server.line(), [(OWNERS[A], mode)]);
    }
}

#[test]
fn a_command_just_after_the_delay_does_not_overtake_those_who_waited_for_its_end() {
    let mut server = Server::new();
    started(&mut server, 100);
    server.waits(A, Plain);
    // The timer is late.
    server.0.pass_without_timer(100);
    let ttl_ms = 50;
    assert_eq!(
        server.acquires(B, Plain, 9, Waits::No),
        Reply::NotHeld { ttl_ms }
    );
    assert!(server.holds(A, Plain));
}

#[test]
fn what_was_loaded_is_entered_renewed_and_released_during_the_delay() {
    for mode in [Plain, Read, Write] {
        let mut server = Server::new();
        server.takes(A, mode, 50);
        started(&mut server, 100);
        assert!(matches!(
            server.acquires(A, mode, 50, Waits::No),
            Reply::Held { count: 2, .. }
        ));
        assert_eq!(server.renews(A, mode, 60), Reply::Number(1));
        assert_eq!(server.releases(A, mode), Reply::Number(1));
        assert_eq!(server.releases(A, mode), Reply::Number(0));
        assert!(!server.holds(A, mode));
    }
}

#[test]
fn what_is_released_during_the_delay_is_handed_over_at_its_end() {
    for (held, wanted) in [(Plain, Plain), (Write, Write), (Read, Write), (Write, Read)] {
        let mut server = Server::new();
        server.takes(A, held, 80);
        started(&mut server, 100);
        server.waits(B, wanted);
        server.releases(A, held);
        assert!(!server.holds(B, wanted));
        server.passes(99);
        assert!(!server.holds(B, wanted));
        server.passes(1);
        assert!(server.holds(B, wanted));
    }
}

#[test]
fn a_reader_beside_readers_is_a_new_grant_and_a_writer_that_reads_is_none() {
    let mut server = Server::new();
    server.takes(A, Read, 300);
    started(&mut server, 100);
    let ttl_ms = 300;
    assert_eq!(
        server.acquires(B, Read, 50, Waits::No),
        Reply::NotHeld { ttl_ms }
    );
    server.waits(B, Read);
    server.waits(C, Read);
    server.passes(100);
    assert!(server.holds(B, Read) && server.holds(C, Read));
    let mut server = Server::new();
    server.takes(A, Write, 300);
    started(&mut server, 100);
    server.waits(B, Read);
    server.takes(A, Read, 300);
    // The writer becomes a reader, and nobody reads with it yet.
    server.releases(A, Write);
    assert!(server.holds(A, Read) && !server.holds(B, Read));
    server.passes(100);
    assert!(server.holds(B, Read));
}

#[test]
fn the_answer_during_the_delay_is_the_longer_of_the_two() {
    let mut server = Server::new();
    server.takes(A, Plain, 50);
    started(&mut server, 100);
    let refused = |ttl_ms| Reply::NotHeld { ttl_ms };
    assert_eq!(server.acquires(B, Plain, 9, Waits::No), refused(100));
    assert_eq!(server.renews(A, Plain, 200), Reply::Number(1));
    assert_eq!(server.acquires(B, Plain, 9, Waits::No), refused(200));
    server.sees(&[Change::Persist]);
    assert_eq!(server.acquires(B, Plain, 9, Waits::No), refused(-1));
}

#[test]
fn the_delay_is_changed_counting_from_the_start_and_ended_with_zero() {
    let mut server = Server::new();
    started(&mut server, 100);
    server.waits(A, Plain);
    server.does(&Op::SetDelay { delay_ms: 200 });
    server.passes(150);
    assert!(!server.holds(A, Plain));
    let ttl_ms = 50;
    assert_eq!(
        server.acquires(B, Plain, 9, Waits::No),
        Reply::NotHeld { ttl_ms }
    );
    server.does(&Op::SetDelay { delay_ms: 0 });
    assert!(server.holds(A, Plain));
}

#[test]
fn a_wall_clock_that_is_set_ends_no_delay() {
    let mut server = Server::new();
    started(&mut server, 100);
    server.waits(A, Plain);
    for ms in [3_600_000, -7_200_000] {
        server.does(&Op::StepClock { ms });
        assert!(!server.holds(A, Plain));
    }
    server.passes(100);
    assert!(server.holds(A, Plain));
}
