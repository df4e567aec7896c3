//! The ledger beside a list of everything that was done, on random schedules with a time of their
//! own. What the list says is found by looking at all of it each time.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::error::LostReason;
use crate::ledger::{
    Delivered, Grant, Hold, HoldOptions, Ledger, Owner, Reserved, Target, UnnamedRelease, Usage,
};
use crate::wire::{Attachment, Event, EventKind, Mode, SessionNumber};

const SCHEDULES: u64 = 2_000;
const STEPS: usize = 60;

/// Numbers that look random, the same for the same seed (xorshift).
struct Chance(u64);

impl Chance {
    fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        let limit = u64::try_from(limit).expect("small");
        let below = self.0.checked_rem(limit).expect("not zero");
        usize::try_from(below).expect("small")
    }
}

/// What an owner takes, in a few ways that have locks in common.
const TARGETS: &[(Mode, &[&str])] = &[
    (Mode::Plain, &["a"]),
    (Mode::Plain, &["b"]),
    (Mode::Several, &["b", "a"]),
    (Mode::Several, &["c", "b"]),
    (Mode::Read, &["d"]),
    (Mode::Write, &["d"]),
];

/// One thing that an owner has or may have.
struct Thing {
    target: usize,
    begun: usize,
    usage: Option<Usage>,
    reserved: Option<(Reserved, Instant)>,
    /// The ends that somebody was promised through it, and does count on.
    hold: Option<Arc<Hold>>,
    /// Its RELEASE without a token, until that is handed over, and until it is answered.
    handing_over: Option<UnnamedRelease>,
    released: Option<UnnamedRelease>,
}

struct World {
    ledger: Arc<Ledger>,
    targets: Vec<Arc<Target>>,
    things: BTreeMap<usize, Thing>,
    /// The latest end that was promised for a lock in a mode since it was last free.
    promised: BTreeMap<(&'static str, bool, bool), Instant>,
    /// The last of all steps in which a RELEASE without a token may have been carried out at a
    /// lock: that of its hand-over if it was answered in order, and otherwise that of its end.
    unnamed_ended: BTreeMap<(&'static str, bool, bool), usize>,
    now: Instant,
    step: usize,
    tokens: u64,
}

/// A lock's side: its name, and whether read or written.
fn sides(target: usize) -> impl Iterator<Item = (&'static str, bool, bool)> {
    let (mode, names) = TARGETS[target];
    let (read, write) = (mode == Mode::Read, mode == Mode::Write);
    names.iter().map(move |name| (*name, read, write))
}

fn meet(one: usize, other: usize) -> bool {
    sides(one).any(|side| sides(other).any(|other| side == other))
}

impl World {
    fn new() -> Self {
        let ledger = Arc::<Ledger>::default();
        let owner = Owner::new("client", 1);
        let targets = TARGETS.iter().map(|(mode, names)| {
            let names: Vec<_> = names.iter().map(|name| name.as_bytes().into()).collect();
            owner.target(&ledger, *mode, &names)
        });
        Self {
            targets: targets.collect(),
            ledger,
            things: BTreeMap::new(),
            promised: BTreeMap::new(),
            unnamed_ended: BTreeMap::new(),
            now: Instant::now(),
            step: 0,
            tokens: 0,
        }
    }

    fn beside(&self, target: usize) -> impl Iterator<Item = &Thing> {
        self.things
            .values()
            .filter(move |thing| meet(thing.target, target))
    }

    fn begin(&mut self, target: usize, lease: u64) {
        let options = HoldOptions {
            lease: Duration::from_millis(lease),
            renewed: true,
            max_hold: None,
        };
        let usage = self.targets[target].claim(options);
        let thing = Thing {
            target,
            begun: self.step,
            usage: Some(usage),
            reserved: None,
            hold: None,
            handing_over: None,
            released: None,
        };
        self.things.insert(self.step, thing);
    }

    /// A command asks for a lease: no shorter than anybody counts on or may be granted.
    fn ask(&mut self, id: usize, wanted: u64) {
        let target = self.things[&id].target;
        let wanted = Duration::from_millis(wanted);
        let granted = sides(target)
            .filter_map(|side| self.promised.get(&side))
            .copied();
        // What one thing asks for may be granted to it alone, but at all its locks.
        let under_way = self
            .beside(target)
            .filter_map(|thing| thing.reserved.as_ref());
        let latest = granted.chain(under_way.map(|(_, end)| *end)).max();
        let left = latest.map_or(Duration::ZERO, |end| {
            end.saturating_duration_since(self.now)
        });
        let reserved = self.targets[target].lease(wanted, self.now);
        assert_eq!(reserved.lease.length, wanted.max(left), "{target}");
        let end = reserved.lease.ends();
        self.things.get_mut(&id).expect("it is there").reserved = Some((reserved, end));
    }

    fn answer(&mut self, id: usize, yes: bool) {
        let now = self.now;
        let thing = self.things.get_mut(&id).expect("it is there");
        let Some((reserved, _)) = thing.reserved.take() else {
            return;
        };
        let lease = reserved.answered(yes);
        let target = thing.target;
        if yes {
            for side in sides(target) {
                let promised = self.promised.entry(side).or_insert(lease.ends());
                *promised = lease.ends().max(*promised);
            }
        }
        let thing = self.things.get_mut(&id).expect("it is there");
        let usage = thing.usage.as_mut().expect("it is there");
        if yes && thing.hold.is_none() {
            self.tokens = self.tokens.saturating_add(1);
            let grant = Grant {
                token: self.tokens,
                lease,
                attachment: Attachment::new(None, now, Duration::ZERO),
                fresh: false,
            };
            thing.hold = Some(Hold::enter(usage, grant, true, now).0);
        }
    }

    /// Begins to give it back, or, where that has begun, hands the RELEASE over.
    fn release(&mut self, id: usize) {
        let thing = self.things.get_mut(&id).expect("it is there");
        let usage = thing.usage.as_mut().expect("it is there");
        usage.give_back();
        if TARGETS[thing.target].0.has_token() {
            return;
        }
        if thing.handing_over.take().is_some() {
            for side in sides(thing.target) {
                self.unnamed_ended.insert(side, self.step);
            }
        } else if thing.released.is_none() {
            thing.handing_over = Some(usage.target.unnamed_release());
            thing.released = Some(usage.target.unnamed_release());
        }
    }

    /// Ends it; a RELEASE of it is answered before all that is handed over after it, or it is not
    /// known to be.
    fn end(&mut self, id: usize, in_order: bool) {
        let mut thing = self.things.remove(&id).expect("it is there");
        let target = thing.target;
        let handed_over = thing.handing_over.is_none();
        if let Some(released) = &mut thing.released {
            released.in_order = in_order;
            if !in_order || !handed_over {
                for side in sides(target) {
                    self.unnamed_ended.insert(side, self.step);
                }
            }
        }
        drop(thing);
        for side in sides(target) {
            let has_it = |thing: &Thing| sides(thing.target).any(|one| one == side);
            if !self.things.values().any(has_it) {
                self.promised.remove(&side);
                // What is under way there is nobody's any more.
            }
        }
    }

    fn lose(&mut self, id: usize) {
        if let Some(hold) = &self.things[&id].hold {
            hold.lose(LostReason::Broken);
        }
    }

    /// An event that a lock was lost is about any hold of it that is not known to be.
    fn told_lost(&self, name: &'static str) {
        let event = Event {
            name: name.into(),
            owner: b"client:1".to_vec(),
            kind: EventKind::Lost(LostReason::Expired),
        };
        let told = self
            .ledger
            .deliver(event, self.now, SessionNumber::new_v4(), self.now);
        let told: BTreeSet<_> = match told {
            Delivered::Lost(holds, LostReason::Expired) => holds.iter().map(Arc::as_ptr).collect(),
            Delivered::Done => BTreeSet::new(),
            _ => panic!("no loss"),
        };
        let holds = self.things.values().filter_map(|thing| {
            let at = sides(thing.target).any(|(one, ..)| one == name);
            thing.hold.as_ref().filter(|_| at)
        });
        let live = holds.filter(|hold| hold.lost(self.now).is_none());
        assert_eq!(told, live.map(Arc::as_ptr).collect(), "{name}");
    }

    fn check(&self) {
        for (index, target) in self.targets.iter().enumerate() {
            let most = sides(index).map(|side| {
                let there = self.things.values();
                there
                    .filter(|thing| sides(thing.target).any(|one| one == side))
                    .count()
            });
            assert_eq!(target.is_alone(), most.max() <= Some(1), "{index}");
        }
        for thing in self.things.values() {
            let under_way = self
                .beside(thing.target)
                .any(|other| other.released.is_some());
            let since = sides(thing.target).filter_map(|side| self.unnamed_ended.get(&side));
            let ended = since.copied().any(|ended| ended >= thing.begun);
            let usage = thing.usage.as_ref().expect("it is there");
            assert_eq!(usage.may_have_been_released(), under_way || ended);
        }
        let known = self.ledger.holds().flatten();
        let known: BTreeSet<_> = known.map(|hold| Arc::as_ptr(&hold)).collect();
        let holds = self.things.values().filter_map(|thing| thing.hold.as_ref());
        assert_eq!(known, holds.map(Arc::as_ptr).collect());
    }
}

#[test]
fn the_ledger_says_what_a_list_of_all_that_was_done_says() {
    for seed in 1..=SCHEDULES {
        let mut chance = Chance(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        let mut world = World::new();
        for step in 0..STEPS {
            world.step = step;
            world.now += Duration::from_millis(u64::try_from(chance.below(40)).expect("small"));
            let lease = u64::try_from(1_000 * (1 + chance.below(30))).expect("small");
            let ids: Vec<_> = world.things.keys().copied().collect();
            let id = ids.get(chance.below(ids.len().max(1))).copied();
            match (chance.below(8), id) {
                (0 | 1, _) | (_, None) => world.begin(chance.below(TARGETS.len()), lease),
                (2, Some(id)) => world.ask(id, lease),
                (3, Some(id)) => world.answer(id, true),
                (4, Some(id)) => world.answer(id, false),
                (5, Some(id)) => world.release(id),
                (6, Some(id)) => world.end(id, chance.below(2) == 0),
                (_, Some(id)) => world.lose(id),
            }
            world.told_lost(["a", "b", "c", "d"][chance.below(4)]);
            world.check();
        }
        for id in world.things.keys().copied().collect::<Vec<_>>() {
            world.end(id, true);
        }
        world.targets.clear();
        assert!(world.ledger.is_empty(), "seed {seed}");
    }
}
