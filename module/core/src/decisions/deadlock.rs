//! Waits that could never end.
//!
//! An owner waits for the holders of all locks that it waits for. It also waits for owners ahead of
//! it in those queues that wait for another lock as well: such an owner may be granted this lock
//! and go on waiting for the other. A wait that would close a circle of owners is refused before it
//! begins, so there is never a circle.
//!
//! If the chain of owners is so long that the search would keep the server busy, the wait is
//! refused as well, with another error. So a circle is never missed, and a wait that could end is
//! never called a deadlock.
//!
//! The search changes nothing. If it finds a circle through a lock where something is due, which
//! may end one of its waits, the caller is told to try again.
//!
//! The search goes from the new wait along the owners that wait for each other, until it comes back
//! to the start or to an end. Only the keyspace knows the holders of a lock, so the search stops at
//! each lock and asks the driver for them.

use crate::interface::error::CommandError;
use crate::memory::table::LockTable;
use crate::values::circle::{Circle, CircleStep};
use crate::values::ids::RecordId;
use crate::values::limits::{CHAIN_MAX, LOOKS_MAX};
use crate::values::lock_key::LockKey;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::rc::Rc;

/// A search for the circle that a new wait would close.
#[derive(Debug)]
pub(crate) struct DeadlockSearch {
    asker: Rc<[u8]>,
    /// The locks of the new wait, as far as anything is known of them.
    new: Vec<RecordId>,
    /// Whether with the new wait the asker waits for several locks.
    waits_for_several: bool,
    /// How each owner was reached.
    reached: HashMap<Rc<[u8]>, Step>,
    to_visit: Vec<Rc<[u8]>>,
    /// The owner whose waits are being followed.
    visited: Rc<[u8]>,
    /// The locks that this owner waits for and that were not looked at yet.
    places: Vec<Place>,
    /// The lock whose holders were asked for.
    asked_about: Option<Place>,
    /// The queues that were looked at.
    seen: BTreeMap<RecordId, Seen>,
    /// How often a queue or a holder was looked at.
    looks: usize,
}

/// The result of a look at a queue for one of its waiters. The waiters ahead of another one are
/// mostly the same, so the result is kept: otherwise many waiters for the same locks would cost the
/// square of their number.
#[derive(Debug)]
struct Seen {
    /// The holders that wait for a lock themselves.
    holders: BTreeSet<Rc<[u8]>>,
    /// Whether these holders were reached from an owner other than the asker.
    reached_holders: bool,
    /// The waiters whose order in the queue is below this were reached.
    before: u64,
}

/// The owner from which another was reached, and at which lock.
type Step = (Rc<[u8]>, Rc<[u8]>);

#[derive(Clone, Debug)]
struct Place {
    lock: LockKey,
    queue: Option<RecordId>,
    /// The place of the new wait.
    is_new: bool,
}

/// A question for a lock's holders costs as much as this many looks.
const ASKED_AS_LOOKS: usize = 10;

impl DeadlockSearch {
    /// Begins a search for the new wait of an owner at these locks.
    pub(crate) fn new(table: &LockTable, owner: &[u8], locks: Vec<LockKey>) -> Self {
        let of_new: Vec<Option<RecordId>> = locks
            .iter()
            .map(|lock| table.queue(lock.as_ref()))
            .collect();
        let known = locks.iter().filter_map(|lock| table.find(lock.as_ref()));
        let known = known.collect();
        let mut elsewhere = table
            .waits_of(owner)
            .map(|(queue, _)| queue)
            .filter(|other| !of_new.contains(&Some(*other)));
        let (other, third) = (elsewhere.next(), elsewhere.next());
        // There is no circle yet, so a new one must pass through something new. That is the new
        // wait; and if it is the owner's second, the waiters behind its first wait, which wait for
        // the owner from now on. So the search begins there as well.
        let second = other.filter(|_| third.is_none());
        let mut places: Vec<Place> = second
            .and_then(|queue| place_at(table, queue))
            .into_iter()
            .collect();
        let waits_for_several = other.is_some() || locks.len() > 1;
        let new = locks.into_iter().zip(of_new).map(|(lock, queue)| Place {
            lock,
            queue,
            is_new: true,
        });
        places.extend(new);
        let asker: Rc<[u8]> = Rc::from(owner);
        Self {
            visited: Rc::clone(&asker),
            asker,
            new: known,
            waits_for_several,
            reached: HashMap::new(),
            to_visit: Vec::new(),
            places,
            asked_about: None,
            seen: BTreeMap::new(),
            looks: 0,
        }
    }

    /// Goes on until it needs the holders of a lock. That is returned, and the holders go to
    /// [`DeadlockSearch::holders`]. None if it is done, and no circle would be closed.
    ///
    /// # Errors
    /// The wait must be refused: it would close a circle, or the search is too long.
    pub(crate) fn go_on(&mut self, table: &LockTable) -> Result<Option<LockKey>, CommandError> {
        loop {
            if self.reached.len() > CHAIN_MAX || self.looks > LOOKS_MAX {
                return Err(CommandError::ChainTooLong);
            }
            if let Some(place) = self.places.pop() {
                self.looks = self.looks.saturating_add(1);
                let Some(seen) = place.queue.and_then(|queue| self.seen.remove(&queue)) else {
                    // A question costs as much as many looks.
                    self.looks = self.looks.saturating_add(ASKED_AS_LOOKS);
                    let lock = place.lock.clone();
                    self.asked_about = Some(place);
                    return Ok(Some(lock));
                };
                self.look_at(table, &place, seen)?;
                continue;
            }
            let Some(owner) = self.to_visit.pop() else {
                return Ok(None);
            };
            self.places = self.places_of(table, &owner);
            self.visited = owner;
        }
    }

    /// The locks that an owner waits for, without the queues whose holders and waiters ahead of it
    /// were reached already.
    fn places_of(&mut self, table: &LockTable, owner: &[u8]) -> Vec<Place> {
        let asker_waits = table.waiting(&self.asker).is_some();
        let (seen, looks) = (&self.seen, &mut self.looks);
        // No more waits are collected than the search may look at.
        let all = table
            .waits_of(owner)
            .take(LOOKS_MAX.saturating_sub(*looks).saturating_add(1));
        let waits = all.filter(|(queue, order)| {
            *looks = looks.saturating_add(1);
            let seen = seen.get(queue).filter(|_| !asker_waits);
            !seen.is_some_and(|seen| seen.reached_holders && seen.before >= *order)
        });
        waits
            .filter_map(|(queue, _)| place_at(table, queue))
            .collect()
    }

    /// Takes the holders of the lock that was asked about, and goes on.
    pub(crate) fn holders(
        &mut self,
        table: &LockTable,
        holders: &[Box<[u8]>],
    ) -> Result<Option<LockKey>, CommandError> {
        let Some(place) = self.asked_about.take() else {
            return self.go_on(table);
        };
        self.looks = self.looks.saturating_add(holders.len());
        // An owner that waits for nothing ends a path. The asker is about to wait.
        let waits = |holder: &[u8]| {
            let waiting = (*holder == *self.asker).then_some(&self.asker);
            waiting.or_else(|| table.waiting(holder)).cloned()
        };
        let holders = holders.iter().filter_map(|holder| waits(holder));
        let seen = Seen {
            holders: holders.collect(),
            reached_holders: false,
            before: 0,
        };
        self.look_at(table, &place, seen)?;
        self.go_on(table)
    }

    /// Reaches the owners that the visited one waits for at this place, if they were not reached
    /// before. Refused if one of them closes a circle.
    fn look_at(
        &mut self,
        table: &LockTable,
        place: &Place,
        mut seen: Seen,
    ) -> Result<(), CommandError> {
        let visited = Rc::clone(&self.visited);
        let mut waited_for: Vec<Rc<[u8]>> = Vec::new();
        let own = place
            .queue
            .and_then(|queue| table.waiter_of(queue, &visited));
        let own = own.map(|(_, waiter)| waiter.order());
        // A holder re-enters its lock and never waits for it: it stands in that lock's queue only
        // as part of a wait for several. If its hold is to end, it waits for those ahead of it.
        let is_ending = |queue| table.is_ending(queue, &visited);
        if !seen.holders.contains(&visited) || place.queue.is_some_and(is_ending) {
            if !seen.reached_holders {
                waited_for.extend(seen.holders.iter().cloned());
                seen.reached_holders = visited != self.asker;
            }
            if let Some(queue) = place.queue {
                // The new wait stands behind all waiters.
                let before = own.filter(|_| !place.is_new).unwrap_or(u64::MAX);
                waited_for.extend(
                    table
                        .multi_queue_waiters(queue, seen.before..before)
                        .cloned(),
                );
                seen.before = seen.before.max(before);
                let of_asker = table.waiter_of(queue, &self.asker);
                let is_behind = of_asker.is_some_and(|(_, waiter)| waiter.order() < before);
                if self.waits_for_several && own.is_some() && is_behind {
                    waited_for.push(Rc::clone(&self.asker));
                }
            }
        }
        if let Some(queue) = place.queue {
            self.seen.insert(queue, seen);
        }
        for owner in waited_for {
            if owner == self.asker && visited != self.asker {
                return Err(self.closes(table, place));
            }
            self.reach(owner, &visited, place);
        }
        Ok(())
    }

    fn reach(&mut self, owner: Rc<[u8]>, from: &Rc<[u8]>, place: &Place) {
        if owner != self.asker && !self.reached.contains_key(&owner) {
            let by = (Rc::clone(from), Rc::clone(&place.lock.name));
            self.reached.insert(Rc::clone(&owner), by);
            self.to_visit.push(owner);
        }
    }

    /// The owner being visited waits for the asker, at this place.
    ///
    /// That is no circle yet where something is due at a lock that one of its owners waits for: a
    /// pending release, or a look for the waiters. It may end one of these waits.
    fn closes(&self, table: &LockTable, last: &Place) -> CommandError {
        let is_due_for =
            |owner: &Rc<[u8]>| table.waits_of(owner).any(|(lock, _)| table.is_due(lock));
        let mut owners = std::iter::successors(Some(&self.visited), |owner| {
            self.reached.get(*owner).map(|(from, _)| from)
        });
        if owners.any(is_due_for) || self.new.iter().any(|lock| table.is_due(*lock)) {
            return CommandError::Unsettled;
        }
        CommandError::Deadlock(self.circle(last))
    }

    /// The circle from the asker on. It closes because the owner being visited waits for the asker.
    fn circle(&self, last: &Place) -> Circle {
        let step = |owner: &Rc<[u8]>, waits_for: &Rc<[u8]>, lock: &Rc<[u8]>| CircleStep {
            owner: Rc::clone(owner),
            waits_for: Rc::clone(waits_for),
            lock: Some(Rc::clone(lock)),
        };
        let mut steps = vec![step(&self.visited, &self.asker, &last.lock.name)];
        let mut at = &self.visited;
        while let Some((from, lock)) = self.reached.get(at) {
            steps.push(step(from, at, lock));
            at = from;
        }
        steps.reverse();
        Circle::of(steps)
    }
}

fn place_at(table: &LockTable, queue: RecordId) -> Option<Place> {
    Some(Place {
        lock: table.lock_of(queue)?.clone(),
        queue: Some(queue),
        is_new: false,
    })
}
