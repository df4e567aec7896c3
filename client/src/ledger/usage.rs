//! What an owner has at its locks, or may have: its guards, and its commands that are under way.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::ledger::entries::{EntryId, Ledger, Side, State};
use crate::ledger::hold::Hold;
use crate::ledger::owner::Owner;
use crate::lost_reason::LostReason;
use crate::time::{Lease, up_to_whole_millis};
use crate::wire::request::{Mode, Subject};

/// Held by whoever stands in the queue.
pub(crate) type Permit = Arc<tokio::sync::Mutex<()>>;

/// What a hold is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HoldOptions {
    /// In whole milliseconds.
    pub(crate) lease: Duration,
    /// Whether the watchdog renews it.
    pub(crate) renewed: bool,
    /// How long it may last at most.
    pub(crate) max_hold: Option<Duration>,
}

/// What an owner takes in one step: a lock in a mode, or several locks.
pub(crate) struct Target {
    ledger: Arc<Ledger>,
    mode: Mode,
    owner: Owner,
    /// As they were given.
    names: SmallVec<[Arc<[u8]>; 1]>,
    /// In the order of their names, in which permits are waited for: no two wait for each other.
    entries: SmallVec<[EntryId; 1]>,
    /// The entry of the first name, as they were given.
    first: Option<EntryId>,
}

impl Target {
    pub(crate) fn new(
        ledger: &Arc<Ledger>,
        owner: &Owner,
        mode: Mode,
        names: &[Arc<[u8]>],
    ) -> Arc<Self> {
        let mut sorted: SmallVec<[_; 1]> = names.iter().collect();
        sorted.sort_unstable();
        let entries: SmallVec<[_; 1]> = ledger.with(|state| {
            let entries = sorted.iter().map(|name| state.enter(owner, name));
            entries.collect()
        });
        let first = names.first();
        let first = sorted.iter().position(|name| Some(*name) == first);
        Arc::new(Self {
            ledger: Arc::clone(ledger),
            mode,
            owner: owner.clone(),
            names: names.into(),
            first: first.and_then(|index| entries.get(index).copied()),
            entries,
        })
    }

    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    pub(crate) fn owner(&self) -> &Owner {
        &self.owner
    }

    pub(crate) fn names(&self) -> &[Arc<[u8]>] {
        &self.names
    }

    /// The name by which it is routed: several locks that are taken in one command are at one node.
    pub(crate) fn key(&self) -> &[u8] {
        self.names.first().map_or(&[], |name| name)
    }

    pub(super) fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    pub(super) fn entries(&self) -> &[EntryId] {
        &self.entries
    }

    pub(super) fn first_entry(&self) -> Option<EntryId> {
        self.first
    }

    /// What commands say that they are about.
    pub(crate) fn subject(&self) -> Subject<'_> {
        Subject {
            mode: self.mode,
            names: &self.names,
            owner: self.owner.as_bytes(),
        }
    }

    /// The permits to wait in the queue, in the order in which to wait for them.
    pub(crate) fn permits(&self) -> SmallVec<[Permit; 1]> {
        self.ledger.with(|state| {
            let entries = state.entries(&self.entries);
            entries.map(|entry| Arc::clone(&entry.permit)).collect()
        })
    }

    /// Counts one more hold, or one more command that may become or end one.
    ///
    /// At one lock the first guard settles the options for all until the last has been given back,
    /// since they share a hold.
    pub(crate) fn claim(self: &Arc<Self>, asked: HoldOptions) -> Usage {
        let mut options = asked;
        let begun = self.ledger.with(|state| {
            state.each_side(&self.entries, self.mode, |side| {
                side.usages = side.usages.saturating_add(1);
                if self.mode != Mode::Several {
                    options = side.options.unwrap_or(asked);
                }
            });
            state.number()
        });
        Usage {
            target: Arc::clone(self),
            options,
            begun,
            granted: begun,
            is_guards: false,
            has_settled: false,
            is_unnamed_release: false,
        }
    }

    /// A lease of this length, to be asked for now; or a longer one, if otherwise another guard of
    /// this owner were to lose a lock before the end that it counts on. Commands are carried out
    /// in the order in which they were handed over, so the one that is handed over next must
    /// promise no less than any before it, as long as that may have been granted.
    pub(crate) fn lease(self: &Arc<Self>, wanted: Duration, now: Instant) -> Reserved {
        self.ledger.with(|state| self.lease_in(state, wanted, now))
    }

    fn lease_in(self: &Arc<Self>, state: &mut State, wanted: Duration, now: Instant) -> Reserved {
        let sides = state.sides(&self.entries, self.mode);
        let promised = sides.filter_map(Side::promised).max();
        let left = promised.map(|until| until.saturating_duration_since(now));
        let lease = Lease {
            since: now,
            length: wanted.max(left.map_or(Duration::ZERO, up_to_whole_millis)),
        };
        let number = state.number();
        let is_alone = self.is_alone_in(state);
        state.each_side(&self.entries, self.mode, |side| {
            side.reserve(number, lease.ends());
        });
        Reserved {
            target: Arc::clone(self),
            number,
            lease,
            wanted,
            is_alone,
            is_kept: false,
        }
    }

    /// No lease that is asked for from now on ends before this one.
    pub(crate) fn promise(&self, lease: Lease) {
        self.ledger.with(|state| {
            state.each_side(&self.entries, self.mode, |side| side.promise(lease));
        });
    }

    /// Whether there is at most one usage: nothing else of this owner is held or under way.
    ///
    /// Only then is it harmless to send an ACQUIRE or RELEASE twice: beside another guard, a second
    /// ACQUIRE ONCE would let two guards live off one hold, and a second RELEASE would take the
    /// other's.
    pub(crate) fn is_alone(&self) -> bool {
        self.ledger.with(|state| self.is_alone_in(state))
    }

    fn is_alone_in(&self, state: &State) -> bool {
        let mut sides = state.sides(&self.entries, self.mode);
        sides.all(|side| side.usages <= 1)
    }

    /// Of several locks the first at which nothing else of this owner is held or under way.
    pub(crate) fn alone_at(&self) -> Option<&Arc<[u8]>> {
        let alone = self.ledger.with(|state| {
            let mut entries = self.entries.iter();
            entries.position(|id| {
                let mut sides = state.sides(std::slice::from_ref(id), self.mode);
                sides.all(|side| side.usages <= 1)
            })
        })?;
        let mut sorted: Vec<_> = self.names.iter().collect();
        sorted.sort_unstable();
        sorted.get(alone).copied()
    }

    /// Whether a RELEASE without a token is under way there.
    pub(crate) fn is_released_unnamed(&self) -> bool {
        self.ledger.with(|state| {
            let mut sides = state.sides(&self.entries, self.mode);
            sides.any(|side| side.may_have_been_released(u64::MAX))
        })
    }

    /// Whether no command is under way that may begin or end a hold of this owner there.
    pub(super) fn is_at_rest_in(&self, state: &State) -> bool {
        let mut sides = state.sides(&self.entries, self.mode);
        sides.all(|side| side.usages == side.guards)
    }

    #[cfg(test)]
    pub(super) fn is_at_rest(&self) -> bool {
        self.ledger.with(|state| self.is_at_rest_in(state))
    }

    /// Where its guards share a hold: at one lock.
    fn shared_entry(&self) -> Option<EntryId> {
        let entry = self.entries.first();
        entry.copied().filter(|_| self.mode != Mode::Several)
    }

    /// The hold that its guards share, if there is one.
    fn shared_in(&self, state: &State) -> Option<Arc<Hold>> {
        let entry = self.shared_entry()?;
        let mut sides = state.sides(std::slice::from_ref(&entry), self.mode);
        sides.next().and_then(|side| side.hold.upgrade())
    }

    /// The hold with this token, shared by all guards that have it, or the new one. Whether the
    /// lease of the new one counts already: see [`Hold::take_over`].
    pub(super) fn share(
        &self,
        state: &mut State,
        granted: &Arc<Hold>,
        acknowledged: bool,
        now: Instant,
    ) -> Arc<Hold> {
        let Some(entry) = self.shared_entry() else {
            return Arc::clone(granted);
        };
        if let Some(present) = self.shared_in(state)
            && present.take_over(state, granted, acknowledged, now)
        {
            return present;
        }
        state.each_side(&[entry], self.mode, |side| {
            side.hold = Arc::downgrade(granted);
        });
        Arc::clone(granted)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.ledger.with(|state| state.leave(&self.entries));
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, name) in self.names.iter().enumerate() {
            let comma = if index == 0 { "" } else { ", " };
            write!(f, "{comma}{}", name.escape_ascii())?;
        }
        Ok(())
    }
}

/// The right to say that this owner may have something there.
pub(crate) struct Usage {
    target: Arc<Target>,
    options: HoldOptions,
    /// Its number.
    begun: u64,
    /// That of the grant, if it was told by an event.
    granted: u64,
    is_guards: bool,
    /// Whether it was a guard's at any time.
    has_settled: bool,
    is_unnamed_release: bool,
}

impl Usage {
    pub(crate) fn target(&self) -> &Arc<Target> {
        &self.target
    }

    pub(crate) fn options(&self) -> HoldOptions {
        self.options
    }

    /// The whole lease, to be asked for now; or, where a hold is entered again that may not last
    /// for so long, as much as is left of it.
    pub(crate) fn lease(&self, now: Instant) -> Reserved {
        let target = &self.target;
        // The hold is dropped when the ledger's lock is free again, for that may take it too.
        let (lease, _entered) = target.ledger.with(|state| {
            let entered = target.shared_in(state);
            let live = entered.as_ref().filter(|hold| !hold.is_over(now));
            let whole = live.map(|hold| hold.lease_anew(now));
            let lease = target.lease_in(state, whole.unwrap_or(self.options.lease), now);
            (lease, entered)
        });
        lease
    }

    /// Whether nothing else of this owner is held or under way there.
    pub(crate) fn is_alone(&self) -> bool {
        self.target.is_alone()
    }

    /// Says that it is a guard's from now on, or again that of a command under way.
    pub(crate) fn is_guards(&mut self, is_guards: bool) {
        let target = Arc::clone(&self.target);
        target
            .ledger
            .with(|state| self.is_guards_in(state, is_guards));
    }

    pub(super) fn is_guards_in(&mut self, state: &mut State, is_guards: bool) {
        if std::mem::replace(&mut self.is_guards, is_guards) == is_guards {
            return;
        }
        let target = &self.target;
        if !std::mem::replace(&mut self.has_settled, true) {
            let is_one = target.mode != Mode::Several;
            state.each_side(&target.entries, target.mode, |side| {
                side.settled = side.settled.saturating_add(1);
                if is_one {
                    self.options = *side.options.get_or_insert(self.options);
                }
            });
        }
        state.each_side(&target.entries, target.mode, |side| {
            side.guards = if is_guards {
                side.guards.saturating_add(1)
            } else {
                side.guards.saturating_sub(1)
            };
        });
    }

    /// Says that a RELEASE without a token is about to be sent for it, and that until this has gone
    /// it may be carried out.
    pub(crate) fn is_released_unnamed(&mut self) {
        if !std::mem::replace(&mut self.is_unnamed_release, true) {
            self.each_side(Side::unnamed_release_begins);
        }
    }

    /// Whether what was granted for this may have been given back by mistake: a RELEASE without a
    /// token, meant for an earlier hold of which nobody here knew that it was lost, may have been
    /// carried out after the grant.
    pub(crate) fn may_have_been_released(&self) -> bool {
        let target = &self.target;
        target.ledger.with(|state| {
            let mut sides = state.sides(&target.entries, target.mode);
            sides.any(|side| side.may_have_been_released(self.begun))
        })
    }

    /// A grant was told for it: what is told of losses before that is about earlier ones.
    pub(crate) fn hears_of_grant(&mut self) {
        self.granted = self.target.ledger.with(State::number);
    }

    /// Why the server is to be asked about what was granted for this: word of a loss came since it
    /// was asked for, or it [may have been released](Self::may_have_been_released).
    pub(crate) fn doubt(&self) -> Option<LostReason> {
        let target = &self.target;
        target.ledger.with(|state| {
            let told = state
                .entries(&target.entries)
                .filter_map(|entry| entry.lost);
            let mut since = told.filter(|(number, _)| *number > self.granted);
            let mut sides = state.sides(&target.entries, target.mode);
            let released = sides.any(|side| side.may_have_been_released(self.begun));
            let told = since.next().map(|(_, reason)| reason);
            told.or(released.then_some(LostReason::NotHeld))
        })
    }

    fn each_side(&self, work: impl FnMut(&mut Side)) {
        let target = &self.target;
        let each = |state: &mut State| state.each_side(&target.entries, target.mode, work);
        target.ledger.with(each);
    }
}

impl Drop for Usage {
    fn drop(&mut self) {
        let target = &self.target;
        target.ledger.with(|state| {
            let number = state.number();
            state.each_side(&target.entries, target.mode, |side| {
                if self.is_guards {
                    side.guards = side.guards.saturating_sub(1);
                }
                if self.is_unnamed_release {
                    side.unnamed_release_ends(number);
                }
                if self.has_settled {
                    side.settled = side.settled.saturating_sub(1);
                }
                if side.settled == 0 {
                    side.options = None;
                }
                side.usages = side.usages.saturating_sub(1);
                if side.usages == 0 {
                    side.forget();
                }
            });
        });
    }
}

/// A lease that a command under way asks for. Until the answer is there, no other command of the
/// owner asks for one that ends earlier; after it, only if the answer was yes. Who hears no answer
/// counts on nothing.
pub(crate) struct Reserved {
    target: Arc<Target>,
    number: u64,
    /// As it is asked for; it may be longer than wanted.
    pub(crate) lease: Lease,
    wanted: Duration,
    /// Whether nothing else of the owner was held or under way when it was asked for.
    pub(crate) is_alone: bool,
    is_kept: bool,
}

impl Reserved {
    /// What its hold counts on if it is granted. What was added is for the sake of others: had it
    /// counted on that too, and theirs been refused, it would have to be kept up for good.
    pub(crate) fn counted(&self) -> Lease {
        Lease {
            length: self.wanted,
            ..self.lease
        }
    }

    /// The server has said yes: somebody is going to count on it.
    pub(crate) fn keep(mut self) -> Lease {
        self.is_kept = true;
        self.counted()
    }

    /// The server has answered: whether with yes.
    pub(crate) fn answered(self, yes: bool) -> Lease {
        if yes { self.keep() } else { self.counted() }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        let target = &self.target;
        target.ledger.with(|state| {
            state.each_side(&target.entries, target.mode, |side| {
                side.unreserve(self.number);
                if self.is_kept {
                    side.promise(self.counted());
                }
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: HoldOptions = HoldOptions {
        lease: Duration::from_secs(30),
        renewed: true,
        max_hold: None,
    };
    const SHORT: HoldOptions = HoldOptions {
        lease: Duration::from_secs(1),
        renewed: false,
        max_hold: None,
    };

    #[test]
    fn an_owner_is_its_text() {
        let owner = Owner::new("client", 7);
        assert_eq!(owner.to_string(), "client:7");
        assert_eq!(owner, owner.clone());
        assert_ne!(owner, Owner::new("client", 8));
        assert!(owner.is_of("client") && !owner.is_of("other") && !owner.is_of("cli"));
    }

    fn names(names: &[&str]) -> Vec<Arc<[u8]>> {
        let names = names.iter().map(|name| Arc::from(name.as_bytes()));
        names.collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_is_not_granted_is_forgotten_and_one_that_is_granted_is_kept() {
        let owner = Owner::new("client", 1);
        let ledger = Arc::<Ledger>::default();
        let both = owner.target(&ledger, Mode::Several, &names(&["b", "a"]));
        let one = owner.target(&ledger, Mode::Plain, &names(&["a"]));
        let usages = [both.claim(LONG), one.claim(SHORT)];
        let asked_next = || one.lease(SHORT.lease, Instant::now()).lease.length;
        let [refused, unanswered, granted] =
            [(); 3].map(|()| both.lease(LONG.lease, Instant::now()));
        assert_eq!(asked_next(), LONG.lease, "any of them may be granted");
        refused.answered(false);
        drop(unanswered);
        assert_eq!(asked_next(), LONG.lease);
        let beside = one.lease(SHORT.lease, Instant::now());
        assert_eq!(beside.lease.length, LONG.lease);
        assert_eq!(beside.keep().length, SHORT.lease, "it counts on its own");
        granted.answered(true);
        assert_eq!(asked_next(), LONG.lease);
        drop(usages);
        let usages = [both.claim(LONG), one.claim(SHORT)];
        let late = both.lease(LONG.lease, Instant::now());
        both.lease(LONG.lease, Instant::now()).answered(false);
        assert_eq!(asked_next(), LONG.lease);
        drop(usages);
        late.answered(true);
        assert_eq!(asked_next(), SHORT.lease, "nobody counts on it any more");
    }

    #[test]
    fn the_first_guard_settles_the_options_until_the_last_is_given_back() {
        let target =
            Owner::new("client", 1).target(&Arc::default(), Mode::Plain, &names(&["name"]));
        let mut first = target.claim(LONG);
        assert_eq!(
            target.claim(SHORT).options(),
            SHORT,
            "the first got nothing yet"
        );
        first.is_guards(true);
        let mut second = target.claim(SHORT);
        assert_eq!(second.options(), LONG);
        assert!(!first.is_alone());
        second.is_guards(true);
        first.is_guards(false);
        assert_eq!(target.claim(SHORT).options(), LONG, "it is given back");
        drop(first);
        assert!(second.is_alone());
        assert_eq!(target.claim(SHORT).options(), LONG);
        let waiting = target.claim(SHORT);
        drop(second);
        assert_eq!(target.claim(SHORT).options(), SHORT);
        drop(waiting);
    }

    #[test]
    fn an_entry_is_shared_while_it_lasts_and_forgotten_after() {
        let owner = Owner::new("client", 1);
        let ledger = Arc::<Ledger>::default();
        let target = owner.target(&ledger, Mode::Plain, &names(&["name"]));
        let several = names(&["z", "name"]);
        let other = owner.clone().target(&ledger, Mode::Several, &several);
        assert_eq!(target.entries[0], other.entries[0]);
        assert_eq!(other.first_entry(), Some(other.entries[1]), "that of z");
        drop((target, other));
        assert!(ledger.is_empty());
    }

    #[test]
    fn who_reads_is_alone_beside_who_writes_but_one_of_several_is_not_beside_the_same_lock() {
        let owner = Owner::new("client", 1);
        let ledger = Arc::<Ledger>::default();
        let usage = |mode, names: &[Arc<[u8]>]| owner.target(&ledger, mode, names).claim(LONG);
        let reader = usage(Mode::Read, &names(&["a"]));
        let writer = usage(Mode::Write, &names(&["a"]));
        assert!(reader.is_alone() && writer.is_alone());
        let several = usage(Mode::Several, &names(&["b", "c"]));
        assert!(several.is_alone());
        let mut plain = usage(Mode::Plain, &names(&["b"]));
        assert!(!several.is_alone() && !plain.is_alone());
        plain.is_guards(true);
        assert!(!plain.target().is_at_rest());
        drop(several);
        assert!(plain.target().is_at_rest());
        plain.is_guards(false);
        assert!(!plain.target().is_at_rest());
    }

    #[tokio::test(start_paused = true)]
    async fn a_lease_that_is_asked_for_later_ends_no_earlier() {
        let owner = Owner::new("client", 1);
        let ledger = Arc::<Ledger>::default();
        let both = owner.target(&ledger, Mode::Several, &names(&["b", "a"]));
        let one = owner.target(&ledger, Mode::Plain, &names(&["a"]));
        let usages = [both.claim(LONG), one.claim(SHORT)];
        let first = both.lease(LONG.lease, Instant::now());
        assert_eq!(first.lease.length, LONG.lease);
        tokio::time::advance(Duration::from_secs(10)).await;
        let second = one.lease(SHORT.lease, Instant::now());
        assert_eq!(second.lease.length, Duration::from_secs(20));
        assert!(second.lease.ends() >= first.lease.ends());
        let reader = owner.target(&ledger, Mode::Read, &names(&["a"]));
        assert_eq!(
            reader.lease(SHORT.lease, Instant::now()).lease.length,
            SHORT.lease
        );
        drop(usages);
        assert_eq!(
            one.lease(SHORT.lease, Instant::now()).lease.length,
            SHORT.lease
        );
    }
}
