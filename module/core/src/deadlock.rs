//! Waits that could never end.
//!
//! An owner waits for the holders of all locks that it waits for, and for those before it in their
//! lines who wait for another lock as well: such a one may be granted here and go on waiting there.
//! A wait that closes a circle of owners is refused before it begins, so no circle ever stands.
//!
//! The search walks from the new wait along who waits for whom until it comes back or to an end. It
//! needs to know who holds a lock, which only the keyspace knows; so it stops and asks the driver,
//! lock by lock.

use crate::error::Word;
use crate::line::{Lines, QueueId, Waiter};
use crate::{CommandError, LockKey};
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

/// A search for the circle that a new wait would close.
#[derive(Debug)]
pub struct DeadlockSearch {
    asker: Rc<[u8]>,
    /// Whether with the new wait the asker waits for several locks.
    waits_for_several: bool,
    /// How each owner was reached.
    reached: HashMap<Rc<[u8]>, Step>,
    to_visit: Vec<Rc<[u8]>>,
    /// Whose waits are being followed.
    visited: Rc<[u8]>,
    /// The locks for which it waits and that are yet to be looked at.
    places: Vec<Place>,
    /// The lock whose holders were asked for.
    asked_about: Option<Place>,
    /// The lines that were looked at.
    seen: BTreeMap<QueueId, Seen>,
}

/// What is known of a line after it was looked at for one who stands in it. Those ahead of another
/// are mostly the same, and a gauges that waits for the same locks must not cost its square.
#[derive(Debug)]
struct Seen {
    /// Those of the holders who wait for anything themselves.
    holders: Vec<Rc<[u8]>>,
    /// Whether the holders were reached from somebody who waits for them.
    reached_holders: bool,
    /// Those ahead of this one were reached.
    before: u64,
}

/// From whom an owner was reached, and at which lock.
#[derive(Debug)]
struct Step {
    from: Rc<[u8]>,
    lock: Rc<[u8]>,
}

#[derive(Clone, Debug)]
struct Place {
    lock: LockKey,
    line: Option<QueueId>,
    /// The place of the new wait.
    is_new: bool,
    /// Whether the owner waits here only together with other locks.
    is_joint: bool,
}

/// What a search needs, or has found.
#[derive(Debug, PartialEq, Eq)]
pub enum Found {
    /// Who holds this lock? To be answered with [`crate::Locks::search_on`].
    Ask(LockKey),
    /// A circle: the wait is to be refused.
    Circle(CommandError),
    /// Nothing: the wait ends when the others do what they should.
    Nothing,
}

impl DeadlockSearch {
    /// Begins a search for the new wait of an owner at a lock, or jointly at several.
    pub(crate) fn new(lines: &Lines, owner: &[u8], locks: Vec<LockKey>, joint: bool) -> Self {
        let of_new: Vec<Option<QueueId>> =
            locks.iter().map(|lock| lines.find(lock.as_ref())).collect();
        let mut elsewhere = lines
            .waits_of(owner)
            .filter(|other| !of_new.contains(&Some(*other)));
        let (other, third) = (elsewhere.next(), elsewhere.next());
        // No circle stands yet, so one must pass through what is new. That is the wait itself; and
        // if it is the owner's second, those behind the first wait for the owner from now on.
        let second = other.filter(|_| third.is_none());
        let mut places: Vec<Place> = second
            .and_then(|at| place_at(lines, owner, at))
            .into_iter()
            .collect();
        let waits_for_several = other.is_some() || locks.len() > 1;
        let new = locks.into_iter().zip(of_new).map(|(lock, line)| Place {
            lock,
            line,
            is_new: true,
            is_joint: joint,
        });
        places.extend(new);
        let asker: Rc<[u8]> = Rc::from(owner);
        Self {
            visited: Rc::clone(&asker),
            asker,
            waits_for_several,
            reached: HashMap::new(),
            to_visit: Vec::new(),
            places,
            asked_about: None,
            seen: BTreeMap::new(),
        }
    }

    /// Goes on until it needs to know something or is done.
    pub(crate) fn go_on(&mut self, lines: &Lines) -> Found {
        loop {
            if let Some(place) = self.places.pop() {
                let Some(seen) = place.line.and_then(|line| self.seen.remove(&line)) else {
                    let lock = place.lock.clone();
                    self.asked_about = Some(place);
                    return Found::Ask(lock);
                };
                match self.look_at(lines, &place, seen) {
                    Some(circle) => return circle,
                    None => continue,
                }
            }
            let Some(owner) = self.to_visit.pop() else {
                return Found::Nothing;
            };
            self.places = places_of(lines, &owner);
            self.visited = owner;
        }
    }

    /// Takes in who holds the lock that was asked about, and goes on.
    pub(crate) fn holders(&mut self, lines: &Lines, holders: &[Box<[u8]>]) -> Found {
        let Some(place) = self.asked_about.take() else {
            return self.go_on(lines);
        };
        // Who waits for nothing is the end of a path. The asker is about to wait.
        let waits = |holder: &[u8]| {
            let waiting = (*holder == *self.asker).then_some(&self.asker);
            waiting.or_else(|| lines.waiting(holder)).cloned()
        };
        let holders = holders.iter().filter_map(|holder| waits(holder));
        let seen = Seen {
            holders: holders.collect(),
            reached_holders: false,
            before: 0,
        };
        match self.look_at(lines, &place, seen) {
            Some(circle) => circle,
            None => self.go_on(lines),
        }
    }

    /// Follows for whom the one being visited waits at this place, as far as they are not yet
    /// reached. A circle, if there is one.
    fn look_at(&mut self, lines: &Lines, place: &Place, mut seen: Seen) -> Option<Found> {
        let visited = Rc::clone(&self.visited);
        // What one holds is re-entered, never waited for. But a second wait of its holder, behind
        // others, is over only when they are.
        let holds = seen.holders.contains(&visited);
        let mut waited_for: Vec<Rc<[u8]>> = Vec::new();
        if !holds && !seen.reached_holders {
            waited_for.extend(seen.holders.iter().cloned());
            seen.reached_holders = visited != self.asker;
        }
        // And a wait for several locks does not wait at all for one that its owner holds.
        if let Some(line) = place.line.filter(|_| !(holds && place.is_joint)) {
            // The new wait stands behind everybody.
            let last = lines.last_of(line, &visited, holds);
            let before = last
                .filter(|_| !place.is_new)
                .map_or(u64::MAX, Waiter::order);
            waited_for.extend(
                lines
                    .multi_queue_waiters(line, seen.before..before)
                    .cloned(),
            );
            seen.before = seen.before.max(before);
            let is_behind = last.is_some_and(|last| lines.is_ahead(line, &self.asker, last));
            if self.waits_for_several && is_behind {
                waited_for.push(Rc::clone(&self.asker));
            }
        }
        if let Some(line) = place.line {
            self.seen.insert(line, seen);
        }
        for owner in waited_for {
            if owner == self.asker && visited != self.asker {
                return Some(Found::Circle(CommandError::Deadlock(self.circle(place))));
            }
            self.reach(owner, &visited, place);
        }
        None
    }

    fn reach(&mut self, owner: Rc<[u8]>, from: &Rc<[u8]>, place: &Place) {
        if owner != self.asker && !self.reached.contains_key(&owner) {
            let by = Step {
                from: Rc::clone(from),
                lock: Rc::clone(&place.lock.name),
            };
            self.reached.insert(Rc::clone(&owner), by);
            self.to_visit.push(owner);
        }
    }

    /// The circle in words, from the asker on, where the owner being visited waits for the asker.
    fn circle(&self, last: &Place) -> String {
        let mut steps = vec![in_words(&self.visited, &self.asker, &last.lock.name)];
        let mut at = &self.visited;
        while let Some(Step { from, lock }) = self.reached.get(at) {
            steps.push(in_words(from, at, lock));
            at = from;
        }
        let owners = steps.len();
        let shown: Vec<String> = steps.into_iter().rev().take(SHOWN_MAX).collect();
        let more = if owners > SHOWN_MAX {
            ", and so on"
        } else {
            ""
        };
        format!(
            "{} owners would wait for each other: {}{more}",
            owners,
            shown.join(", ")
        )
    }
}

/// A longer circle is cut in the error's text.
const SHOWN_MAX: usize = 16;

fn in_words(owner: &[u8], waits_for: &[u8], lock: &[u8]) -> String {
    let (owner, waits_for, lock) = (Word::new(owner), Word::new(waits_for), Word::new(lock));
    format!("'{owner}' waits for '{waits_for}' at '{lock}'")
}

fn places_of(lines: &Lines, owner: &[u8]) -> Vec<Place> {
    lines
        .waits_of(owner)
        .filter_map(|line| place_at(lines, owner, line))
        .collect()
}

fn place_at(lines: &Lines, owner: &[u8], line: QueueId) -> Option<Place> {
    let lock = lines.lock_of(line)?.clone();
    let mut own = lines.all_of(line, owner);
    Some(Place {
        lock,
        line: Some(line),
        is_new: false,
        is_joint: own.all(|(_, waiter)| waiter.joint.is_some()),
    })
}

/// A circle of one: a reader that asks to write.
pub(crate) fn upgrade_in_words(owner: &[u8], lock: &[u8]) -> String {
    let step = in_words(owner, owner, lock);
    format!("a reader cannot become the writer: {step}")
}
