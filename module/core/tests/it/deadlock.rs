//! Waits that could never end: the core's search against a naive one, over many owners and locks.

use crate::circles::{Graph, Standing};
use crate::keyspace::{Keyspace, Place, Reading};
use proptest::prelude::*;
use proptest::test_runner::FileFailurePersistence;
use rlock_core::request::{Acquire, Cancel, MultiAcquire, NamedKey, Release, WaitMode};
use rlock_core::{
    BlockedClient, Command, CommandError, Effect, INTEGER_MAX, Keys, Lease, LockKey, Locks, Mode,
    Now, Outcome, Purpose, Read, Stored, Subject, Turn, Wait, WaiterId,
};

const NOW: Now = Now {
    wall_us: 1_000_000_000,
    mono_ms: 0,
};

/// One thing that happens between owners and locks.
#[derive(Clone, Copy, Debug)]
enum Op {
    Want {
        owner: usize,
        lock: usize,
    },
    /// Three locks of one database, any of them more than once.
    WantTogether {
        owner: usize,
        locks: [usize; 3],
    },
    Release {
        owner: usize,
        lock: usize,
    },
    Cancel {
        owner: usize,
        lock: usize,
    },
    Break {
        lock: usize,
    },
    /// The waiter with this number leaves, counted around.
    Depart {
        waiter: usize,
    },
}

/// A core with its keyspace, and the waits in it.
#[derive(Default)]
struct Crossing {
    locks: Locks,
    space: Keyspace,
    waiting: Vec<Waiting>,
    clients: usize,
    /// The locks whose holders the last search asked for.
    asked: usize,
    refused: usize,
}

#[derive(Clone, Debug)]
struct Waiting {
    places: Vec<Place>,
    is_joint: bool,
    owner: Vec<u8>,
    client: usize,
    id: WaiterId,
}

/// Locks of the same names in two databases.
fn place_of(lock: usize) -> Place {
    let db = i32::try_from(lock % 2).unwrap();
    (db, format!("l{}", lock / 2).into_bytes())
}

/// Each once, and all of them in the database of the first.
fn places_of(locks: [usize; 3]) -> Vec<Place> {
    let mut places = Vec::new();
    for lock in locks {
        let place = place_of(lock / 2 * 2 + locks[0] % 2);
        if !places.contains(&place) {
            places.push(place);
        }
    }
    places
}

fn owner_of(owner: usize) -> Vec<u8> {
    format!("o{owner}").into_bytes()
}

impl Crossing {
    fn step(&mut self, op: Op) -> Result<(), String> {
        match op {
            Op::Want { owner, lock } => self.want(&place_of(lock), &owner_of(owner)).map(|_| ())?,
            Op::WantTogether { owner, locks } => {
                self.want_together(&places_of(locks), &owner_of(owner))?;
            }
            Op::Release { owner, lock } => self.release(&place_of(lock), &owner_of(owner))?,
            Op::Cancel { owner, lock } => self.cancel(&place_of(lock), &owner_of(owner))?,
            Op::Break { lock } => self.break_hold(&place_of(lock))?,
            Op::Depart { waiter } => {
                if let Some(at) = waiter.checked_rem(self.waiting.len()) {
                    let gone = self.waiting.remove(at);
                    self.locks
                        .waiter_gone(gone.id)
                        .ok_or("who waits cannot depart")?;
                }
            }
        }
        self.settle()?;
        crate::assert_invariants(&self.locks);
        Ok(())
    }

    /// Whether the wait, if it came to one, was refused.
    fn want(&mut self, place: &Place, owner: &[u8]) -> Result<bool, String> {
        let request = Acquire {
            key: &place.1,
            owner,
            lease: Lease::from_ms(INTEGER_MAX).unwrap(),
            mode: Mode::Plain,
            asked: None,
            wait_mode: WaitMode::Block(Wait::from_ms(0).unwrap()),
            session: None,
            wanted: false,
            once: false,
        };
        self.ask(
            Command::Acquire(&request),
            std::slice::from_ref(place),
            false,
        )
    }

    /// The same for several locks at once.
    fn want_together(&mut self, places: &[Place], owner: &[u8]) -> Result<bool, String> {
        let name = |(place, (_, name)): (usize, &'_ Place)| (place, name.clone());
        let names: Vec<(usize, Vec<u8>)> = (4..).zip(places).map(name).collect();
        let keys = names.iter().map(|(place, name)| NamedKey {
            place: *place,
            name,
        });
        let request = MultiAcquire {
            owner,
            lease: Lease::from_ms(INTEGER_MAX).unwrap(),
            keys: keys.collect(),
            wait_mode: WaitMode::Block(Wait::from_ms(0).unwrap()),
            session: None,
            wanted: false,
            once: false,
        };
        self.ask(Command::MultiAcquire(&request), places, true)
    }

    /// Asks for locks, and waits for them if no circle comes of it. Whether one would.
    fn ask(
        &mut self,
        command: Command<'_>,
        places: &[Place],
        is_joint: bool,
    ) -> Result<bool, String> {
        let (owner, client) = (command.owner(), self.clients);
        self.asked = 0;
        let mut turn = Turn::of(command, places[0].0, u32::MAX);
        self.drive(&mut turn, Some((command, places[0].0)))?;
        let mut graph = self.graph();
        // A wait closes no circle that stands without it. One can come to stand when an owner that
        // waits for several locks loses one of them that it held: it waits behind others there now.
        let stands = graph.is_in_a_circle(owner);
        let refused = match turn.outcome() {
            Ok(Outcome::MustWait { .. }) => None,
            Err(CommandError::Deadlock(circle)) => Some(format!("DEADLOCK {circle}")),
            // Nobody stands in a queue twice.
            Ok(_) | Err(CommandError::Waiting) => return Ok(false),
            Err(error) => return Err(error.to_string()),
        };
        for place in places {
            let line = graph.lines.entry(place.clone()).or_default();
            line.push(Standing {
                owner: owner.to_vec(),
                joint: is_joint.then_some(client),
            });
        }
        if !stands && refused.is_some() != graph.is_in_a_circle(owner) {
            return Err(format!("refused: {refused:?}, and {graph:?}"));
        }
        if let Some(text) = refused {
            self.refused += 1;
            return is_a_circle(&text, owner, &graph).map(|()| true);
        }
        self.clients += 1;
        let blocked = BlockedClient {
            handle: client,
            client_id: 0,
        };
        let joined = self
            .locks
            .enqueue(&mut turn, Some(blocked), NOW, &mut Vec::new());
        self.waiting.push(Waiting {
            places: places.to_vec(),
            is_joint,
            owner: owner.to_vec(),
            client,
            id: joined.ok_or("no room")?.waiter,
        });
        Ok(false)
    }

    /// Drives a turn as the module does.
    fn drive(
        &mut self,
        turn: &mut Turn<'_>,
        command: Option<(Command<'_>, i32)>,
    ) -> Result<(), String> {
        while let Some(task) = self.locks.next_task(turn, NOW) {
            let place = |lock: &LockKey| (lock.db, lock.name.to_vec());
            let (places, owner, several) = match (&task.subject, command) {
                (Subject::Command, Some((command, db))) => match command.keys() {
                    Keys::One(name) => (vec![(db, name.to_vec())], command.owner().to_vec(), false),
                    Keys::Several(keys) => {
                        let names = keys.iter().map(|key| (db, key.name.to_vec()));
                        (names.collect(), command.owner().to_vec(), true)
                    }
                },
                (Subject::One(lock, owner), _) => (vec![place(lock)], owner.to_vec(), false),
                (Subject::Several(locks, owner), _) => {
                    (locks.iter().map(place).collect(), owner.to_vec(), true)
                }
                (Subject::Command, None) => return Err("a command that nobody sent".into()),
            };
            let read = |place| self.space.read(place, &owner, task.depth, Reading::All);
            let stored: Vec<Stored> = places.iter().map(read).collect();
            let holders = self.space.holders(&places[0]);
            let is_break = matches!(command, Some((Command::Break(_), _)));
            let read = match task.purpose {
                Purpose::Holders => {
                    self.asked += 1;
                    Read::Owners(&holders)
                }
                Purpose::Command if is_break => Read::Holds(stored[0], &[], None),
                _ if several => Read::Several(&stored),
                _ => Read::One(&stored[0]),
            };
            let mut effects = Vec::new();
            self.locks.decide(turn, task.found(read), NOW, &mut effects);
            self.carry_out(&places, &owner, &effects)?;
        }
        Ok(())
    }

    /// A command that does not wait.
    fn decide(&mut self, command: Command<'_>, place: &Place) -> Result<(), String> {
        let mut turn = Turn::of(command, place.0, u32::MAX);
        self.drive(&mut turn, Some((command, place.0)))?;
        turn.outcome().map_err(|error| error.to_string())?;
        Ok(())
    }

    fn release(&mut self, place: &Place, owner: &[u8]) -> Result<(), String> {
        let request = Release {
            key: &place.1,
            owner,
            mode: Mode::Plain,
            permits: None,
            token: None,
            lease: None,
            by: None,
        };
        self.decide(Command::Release(&request), place)
    }

    fn cancel(&mut self, place: &Place, owner: &[u8]) -> Result<(), String> {
        let request = Cancel {
            key: &place.1,
            owner,
            mode: None,
        };
        self.decide(Command::Cancel(&request), place)
    }

    fn break_hold(&mut self, place: &Place) -> Result<(), String> {
        self.decide(Command::Break(&place.1), place)
    }

    fn settle(&mut self) -> Result<(), String> {
        self.drive(&mut Turn::of_timer(), None)
    }

    fn carry_out(
        &mut self,
        places: &[Place],
        caller: &[u8],
        effects: &[Effect],
    ) -> Result<(), String> {
        for effect in effects {
            if let Effect::Write { lock, write } = effect {
                self.space.carry_out(&places[*lock], caller, write)?;
            }
            if let Effect::Grant { client, .. } | Effect::Leave { client, .. } = effect {
                self.waiting.retain(|waiting| waiting.client != *client);
            }
        }
        Ok(())
    }

    fn graph(&self) -> Graph {
        let mut graph = Graph::default();
        for waiting in &self.waiting {
            for place in &waiting.places {
                let line = graph.lines.entry(place.clone()).or_default();
                line.push(Standing {
                    owner: waiting.owner.clone(),
                    joint: waiting.is_joint.then_some(waiting.client),
                });
            }
        }
        for (place, _) in self.space.entries() {
            let holders = self.space.holders(place).into_iter().map(Vec::from);
            graph.holders.insert(place.clone(), holders.collect());
        }
        graph
    }
}

/// Whether the words of a refusal are true: a circle of real steps from the asker back to it. A
/// long circle is cut.
fn is_a_circle(text: &str, asker: &[u8], graph: &Graph) -> Result<(), String> {
    let tell = || format!("{text}, and {graph:?}");
    let rest = text.strip_prefix("DEADLOCK ").ok_or_else(tell)?;
    let (number, steps) = rest
        .split_once(" owners would wait for each other: ")
        .ok_or_else(tell)?;
    let number: usize = number.parse().map_err(|_| tell())?;
    let (steps, is_cut) = match steps.strip_suffix(", and so on") {
        Some(steps) => (steps, true),
        None => (steps, false),
    };
    let mut at = asker.to_vec();
    let mut shown = 0;
    for step in steps.split(", ") {
        let mut words = step.split('\'').filter(|word| !word.trim().is_empty());
        let (from, _) = (words.next().ok_or_else(tell)?, words.next());
        let to = words.next().ok_or_else(tell)?.as_bytes().to_vec();
        if from.as_bytes() != at || !graph.waits_for(&at).contains(&to) {
            return Err(format!("no such step: {step}, in {}", tell()));
        }
        at = to;
        shown += 1;
    }
    let is_whole = shown == number && at == asker;
    if is_whole != is_cut && (is_cut || shown == number) {
        Ok(())
    } else {
        Err(tell())
    }
}

fn op(owners: usize, locks: usize) -> impl Strategy<Value = Op> {
    prop_oneof![
        8 => (0..owners, 0..locks).prop_map(|(owner, lock)| Op::Want { owner, lock }),
        6 => (0..owners, [0..locks, 0..locks, 0..locks])
            .prop_map(|(owner, locks)| Op::WantTogether { owner, locks }),
        4 => (0..owners, 0..locks).prop_map(|(owner, lock)| Op::Release { owner, lock }),
        1 => (0..owners, 0..locks).prop_map(|(owner, lock)| Op::Cancel { owner, lock }),
        1 => (0..locks).prop_map(|lock| Op::Break { lock }),
        2 => any::<usize>().prop_map(|waiter| Op::Depart { waiter }),
    ]
}

fn run(ops: &[Op]) -> Result<(), TestCaseError> {
    let mut crossing = Crossing::default();
    for (at, op) in ops.iter().enumerate() {
        crossing
            .step(*op)
            .map_err(|wrong| TestCaseError::fail(format!("at {at}, {op:?}: {wrong}")))?;
    }
    Ok(())
}

/// Fewer where nothing is optimized.
const CASES: u32 = if cfg!(debug_assertions) { 100 } else { 1_000 };

proptest! {
    #![proptest_config(ProptestConfig {
        cases: CASES,
        max_shrink_iters: 20_000,
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(
            "tests/proptest-regressions/deadlock.txt",
        ))),
        ..ProptestConfig::default()
    })]

    #[test]
    fn a_wait_of_few_is_refused_if_it_closes_a_circle_and_only_then(
        ops in proptest::collection::vec(op(4, 4), 1..60),
    ) {
        run(&ops)?;
    }

    #[test]
    fn a_wait_of_many_is_refused_if_it_closes_a_circle_and_only_then(
        ops in proptest::collection::vec(op(16, 12), 1..120),
    ) {
        run(&ops)?;
    }

    /// An owner that waits for a lock does not wait for it twice here: granted its first wait, it
    /// could close a circle with its second that no check has seen come. And no owner gives back a
    /// lock that it waits for together with others, or has it taken: an owner in the queue of a
    /// lock that it holds is behind the earlier waiters only after it loses the lock.
    #[test]
    fn no_circle_ever_stands(
        ops in proptest::collection::vec(op(6, 5), 1..80),
    ) {
        let mut crossing = Crossing::default();
        for op in ops {
            let (wanted, owner) = match op {
                Op::Want { owner, lock } | Op::Release { owner, lock } => {
                    (vec![place_of(lock)], owner)
                }
                Op::WantTogether { owner, locks } => (places_of(locks), owner),
                Op::Break { lock } => {
                    let holders = crossing.space.holders(&place_of(lock));
                    let waits = |of: &Waiting| {
                        of.places.contains(&place_of(lock)) && holders.contains(&(*of.owner).into())
                    };
                    if crossing.waiting.iter().any(waits) {
                        continue;
                    }
                    (Vec::new(), 0)
                }
                _ => (Vec::new(), 0),
            };
            let owner = owner_of(owner);
            let mut own = crossing.waiting.iter().filter(|of| of.owner == owner);
            if own.any(|of| of.places.iter().any(|place| wanted.contains(place))) {
                continue;
            }
            crossing.step(op).map_err(TestCaseError::fail)?;
            let graph = crossing.graph();
            for owner in (0..6).map(owner_of) {
                prop_assert!(!graph.is_in_a_circle(&owner), "after {:?}: {:?}", op, graph);
            }
        }
    }
}

/// Owner n holds lock n and waits for lock n + 1, up to the last one, which only holds.
fn chain(length: usize) -> Crossing {
    let mut crossing = Crossing::default();
    for at in 0..length {
        crossing
            .step(Op::Want {
                owner: at,
                lock: at,
            })
            .unwrap();
    }
    for at in 0..length - 1 {
        let lock = at + 1;
        crossing.step(Op::Want { owner: at, lock }).unwrap();
    }
    crossing
}

/// The longest way through a chain passes each of its locks once.
#[test]
fn a_circle_of_a_thousand_is_found_by_a_look_at_each_lock() {
    const LENGTH: usize = 1000;
    let mut crossing = chain(LENGTH);
    let (first, last) = (place_of(0), owner_of(LENGTH - 1));
    assert!(crossing.want(&first, &last).unwrap());
    assert!(crossing.asked <= LENGTH + 1, "{} looks", crossing.asked);
    // One in the middle has left: the same wait has an end, and goes no further than there.
    let cancel = Op::Cancel {
        owner: LENGTH / 2,
        lock: LENGTH / 2 + 1,
    };
    crossing.step(cancel).unwrap();
    assert!(!crossing.want(&first, &last).unwrap());
    assert!(crossing.asked <= LENGTH / 2 + 2, "{} looks", crossing.asked);
}

/// Waiters for this lock alone do not matter to the next waiter, and where nobody waits for another
/// lock there is nothing to look for.
#[test]
fn a_wait_behind_a_crowd_costs_one_look_at_most() {
    let mut crossing = Crossing::default();
    for owner in 0..200 {
        crossing.step(Op::Want { owner, lock: 0 }).unwrap();
    }
    assert!(!crossing.want(&place_of(0), b"another").unwrap());
    assert_eq!(crossing.asked, 0);
    for owner in [200, 201] {
        crossing.step(Op::Want { owner, lock: 1 }).unwrap();
    }
    assert!(!crossing.want(&place_of(0), b"one more").unwrap());
    assert_eq!(crossing.asked, 1);
}

/// The first in the queue would be granted here and go on waiting there, for the waiter behind it.
#[test]
fn a_circle_that_a_grant_would_close_is_found() {
    let mut crossing = Crossing::default();
    let (holder, ahead, behind) = (0, 1, 2);
    for (owner, lock) in [(holder, 0), (behind, 1), (ahead, 0), (ahead, 1)] {
        crossing.step(Op::Want { owner, lock }).unwrap();
    }
    assert!(crossing.want(&place_of(0), &owner_of(behind)).unwrap());
    // The owner ahead no longer waits for the lock of the owner behind it.
    let (owner, lock) = (ahead, 1);
    crossing.step(Op::Cancel { owner, lock }).unwrap();
    assert!(!crossing.want(&place_of(0), &owner_of(behind)).unwrap());
}

/// A holder has its lock already when it waits for it together with others. A further wait for that
/// lock alone, behind others, does not put it behind later waiters.
#[test]
fn a_holder_does_not_wait_for_those_ahead_of_what_it_wants_with_others() {
    let mut crossing = Crossing::default();
    let (before, holder, ahead, asker, other) = (0, 1, 2, 3, 4);
    let want = |owner, lock| Op::Want { owner, lock };
    let together = |owner, locks| Op::WantTogether { owner, locks };
    for op in [
        want(before, 0),
        want(other, 2),
        want(holder, 0),
        together(ahead, [0, 4, 0]),
        want(holder, 0),
        Op::Release {
            owner: before,
            lock: 0,
        },
        together(asker, [0, 4, 0]),
        together(holder, [0, 2, 0]),
    ] {
        crossing.step(op).unwrap();
    }
    assert_eq!(crossing.refused, 0);
    let again = places_of([0, 6, 0]);
    assert!(!crossing.want_together(&again, &owner_of(asker)).unwrap());
}
