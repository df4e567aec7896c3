//! What an owner has at its locks, or may have: its guards, and its commands that are under way.

use std::fmt;
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::Instant;

use crate::ledger::{Entry, EntryId, Hold, Ledger, Owner, Side, State};
use crate::wire::{Mode, Released, Subject};
use crate::{Lease, LostReason, locked, up_to_whole_millis};

/// Held by whoever stands in the queue.
pub(crate) type Permit = Arc<tokio::sync::Mutex<()>>;

/// What a hold is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct HoldOptions {
    /// In whole milliseconds.
    pub(crate) lease: Duration,
    /// Whether the watchdog renews it.
    pub(crate) renewed: bool,
    /// How long it may last at most.
    pub(crate) max_hold: Option<Duration>,
}

impl HoldOptions {
    /// The whole lease, if it began then.
    pub(crate) fn lease_from(&self, since: Instant) -> Lease {
        let length = self.lease;
        Lease { since, length }
    }
}

/// What an owner takes in one step: a lock in a mode, or several locks.
pub(crate) struct Target {
    pub(super) ledger: Arc<Ledger>,
    pub(crate) mode: Mode,
    pub(crate) owner: Owner,
    /// As they were given.
    pub(crate) names: SmallVec<[Arc<[u8]>; 1]>,
    /// One for each name, in the same order.
    pub(super) entries: SmallVec<[EntryId; 1]>,
}

impl Owner {
    /// What this owner takes in this mode, with the client of this ledger: one lock, or several.
    pub(crate) fn target(
        &self,
        ledger: &Arc<Ledger>,
        mode: Mode,
        names: &[Arc<[u8]>],
    ) -> Arc<Target> {
        let enter = |state: &mut State| names.iter().map(|name| state.enter(self, name)).collect();
        Arc::new(Target {
            mode,
            owner: self.clone(),
            names: names.into(),
            entries: ledger.with(enter),
            ledger: Arc::clone(ledger),
        })
    }
}

impl Target {
    /// The name by which it is routed: several locks that are taken in one command are at one node.
    pub(crate) fn key(&self) -> &[u8] {
        self.names.first().map_or(&[], |name| name)
    }

    /// One of its locks alone.
    pub(crate) fn one(&self, name: &Arc<[u8]>) -> Arc<Self> {
        let names = std::slice::from_ref(name);
        self.owner.target(&self.ledger, Mode::Plain, names)
    }

    /// What commands say that they are about.
    pub(crate) fn subject(&self) -> Subject<'_> {
        Subject {
            mode: self.mode,
            names: &self.names,
            owner: self.owner.as_str().as_bytes(),
        }
    }

    pub(super) fn sides<'a>(&'a self, state: &'a State) -> impl Iterator<Item = &'a Side> {
        let entries = state.entries(&self.entries);
        entries.map(|entry| entry.side(self.mode))
    }

    /// Changes what the owner has at each of the locks.
    fn change(&self, work: impl FnMut(&mut Side)) {
        self.ledger.with(|state| self.each_side(state, work));
    }

    /// Whether it is so of what the owner has at any of the locks.
    pub(super) fn any_side(&self, is: impl FnMut(&Side) -> bool) -> bool {
        self.ledger.with(|state| self.sides(state).any(is))
    }

    pub(super) fn each_side(&self, state: &mut State, mut work: impl FnMut(&mut Side)) {
        state.each_entry(&self.entries, |entry| work(entry.side_mut(self.mode)));
    }

    /// What its owner has there in whatever mode, the last to come at last. To be dropped when the
    /// ledger's lock is free again, for that takes it too.
    pub(super) fn held(&self, state: &State) -> SmallVec<[Arc<Hold>; 2]> {
        let entries = state.entries(&self.entries);
        entries.flat_map(Entry::held).collect()
    }

    /// The same, if guards have any of it.
    pub(crate) fn guarded(&self) -> SmallVec<[Arc<Hold>; 2]> {
        self.ledger.with(|state| {
            let is_guarded = self.sides(state).any(|side| side.guards > 0);
            let held = is_guarded.then(|| self.held(state));
            held.unwrap_or_default()
        })
    }

    /// Whether there are guards with which another could share a hold.
    pub(super) fn is_shared(&self, state: &State) -> bool {
        self.sides(state).any(|side| side.sharing > 0)
    }

    /// Whether their guards share a hold, if it is of the same lock and has the same token.
    pub(super) fn shares_with(&self, other: &Self) -> bool {
        self.mode == other.mode && self.mode != Mode::Several
    }

    /// The permits to wait in the queue, in the order in which to wait for them. It is the same for
    /// all, so that no two wait for each other.
    pub(crate) fn permits(&self) -> SmallVec<[Permit; 1]> {
        let mut entries = self.entries.clone();
        entries.sort_unstable();
        let mut permits = SmallVec::new();
        self.ledger.with(|state| {
            state.each_entry(&entries, |entry| {
                permits.push(Arc::clone(entry.permit.get_or_insert_default()));
            });
        });
        permits
    }

    /// Held from the decision what a command says until it is handed over. Of two threads that
    /// decide, the one that was alone, or asked for the shorter lease, could otherwise be the last
    /// to hand over: with ONCE two guards would live off one hold, and a lease would be cut short.
    /// Nothing may be dropped meanwhile that gives something back: that takes its turn too.
    pub(crate) fn turn(&self) -> MutexGuard<'_, ()> {
        locked(&self.ledger.turn)
    }

    /// Counts one more hold, or one more command that may become or end one.
    ///
    /// At one lock the first guard settles the options for all until the last is given back, since
    /// they share a hold.
    pub(crate) fn claim(self: &Arc<Self>, asked: HoldOptions) -> Usage {
        let mut options = asked;
        let begun = self.ledger.with(|state| {
            self.each_side(state, |side| {
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
            is_next: false,
            begun,
            granted: begun,
            is_guarded: false,
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
        let promised = self.sides(state).filter_map(|side| {
            let reserved = side.reserved.iter().map(|(_, until)| *until);
            reserved.chain(side.promised).max()
        });
        let left = promised.max();
        let left = left.map(|until| up_to_whole_millis(until.saturating_duration_since(now)));
        let length = wanted.max(left.unwrap_or_default());
        let lease = Lease { since: now, length };
        let number = state.number();
        let is_alone = self.is_alone_in(state);
        self.each_side(state, |side| {
            side.asked = number;
            side.reserved.push((number, lease.ends()));
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
        self.change(|side| side.promise(lease));
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
        self.sides(state).all(|side| side.usages <= 1)
    }

    /// Of several locks those at which nothing else of this owner is held or under way, nor left.
    pub(crate) fn alone_at(&self, now: Instant) -> impl Iterator<Item = &Arc<[u8]>> {
        let is_alone = |side: &Side| {
            side.usages <= 1 && !side.has_more && side.left_until.is_none_or(|until| until <= now)
        };
        let alone = self.ledger.with(|state| {
            let sides = self.sides(state).map(is_alone);
            sides.collect::<SmallVec<[bool; 4]>>()
        });
        let names = self.names.iter().zip(alone);
        names.filter_map(|(name, is_alone)| is_alone.then_some(name))
    }

    /// How often the owner may hold it, as far as is known; of several locks the one that it may
    /// hold most often. Guards that are lost hold nothing; unless what was granted now has their
    /// token: then the server has not ended it.
    pub(crate) fn most(&self, token: u64, now: Instant) -> u64 {
        let (most, _held) = self.ledger.with(|state| {
            let held = self.held(state);
            let is_same = |hold: &Hold| hold.token_at(self.key()) == token;
            let is_there = |hold: &Arc<Hold>| is_same(hold) || !hold.is_over(now);
            let are_there = held.iter().any(is_there);
            let lost = |side: &Side| if are_there { 0 } else { side.guards };
            let count = |side: &Side| side.usages.saturating_sub(lost(side));
            let most = self.sides(state).map(count).max();
            (most.unwrap_or_default(), held)
        });
        u64::try_from(most).unwrap_or(u64::MAX)
    }

    /// A RELEASE without a token is about to be handed over, or sent again.
    pub(crate) fn unnamed_release(self: &Arc<Self>) -> UnnamedRelease {
        self.change(|side| side.unnamed_releases = side.unnamed_releases.saturating_add(1));
        let (target, in_order) = (Arc::clone(self), false);
        UnnamedRelease { target, in_order }
    }

    /// Notes how often the server says that a writer holds it, to be called in the order of the
    /// answers. Whether that is once more than when it said so last, and has been since the first:
    /// then nothing of the owner's had been lost at this grant, and each RELEASE takes what it is
    /// meant for.
    ///
    /// Once it was wrong it tells nothing until all has been given back. Behind a loss that nobody
    /// has heard of two calls are granted: the first is counted wrong, the second is one more than
    /// that, and the RELEASE of what was lost takes one of the two.
    ///
    /// A grant to a wait is told by an event, and that may come behind the answers to calls which
    /// have entered it since: the first of these counts it too.
    pub(crate) fn counted(&self, count: u64, token: u64) -> bool {
        let mut is_next = false;
        if self.mode == Mode::Write {
            self.ledger.with(|state| {
                state.each_entry(&self.entries, |entry| {
                    let is_waiting = entry.wait.is_some();
                    is_next = entry.side_mut(self.mode).counted(count, token, is_waiting);
                });
            });
        }
        is_next
    }

    /// The same when one was given back.
    pub(crate) fn released(&self, released: Released) {
        if self.mode == Mode::Write {
            self.change(|side| {
                side.count = side.count.saturating_sub(1);
                side.is_miscounted |= matches!(released, Released::Left(_)) != (side.count > 0);
            });
        }
    }

    /// Whether a RELEASE without a token may have been carried out behind what has this number.
    pub(crate) fn is_released_since(&self, number: u64) -> bool {
        let ledger = &self.ledger;
        ledger.with(|state| self.may_have_been_released(state, number))
    }

    /// Whether one may have been carried out after a command that had this number before it was
    /// handed over.
    fn may_have_been_released(&self, state: &State, since: u64) -> bool {
        self.sides(state)
            .any(|side| side.unnamed_releases > 0 || side.unnamed_release > since)
    }

    /// Whether no command is under way that may begin or end a hold of this owner there.
    pub(super) fn is_at_rest(&self, state: &State) -> bool {
        let mut sides = self.sides(state);
        sides.all(|side| side.usages == side.guards)
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        self.ledger.with(|state| state.leave(&self.entries));
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |name: &Arc<[u8]>| name.escape_ascii().to_string();
        let names: Vec<_> = self.names.iter().map(shown).collect();
        f.write_str(&names.join(", "))
    }
}

/// The right to say that this owner may have something there.
pub(crate) struct Usage {
    pub(crate) target: Arc<Target>,
    pub(crate) options: HoldOptions,
    /// See [`Target::counted`].
    pub(crate) is_next: bool,
    /// Its number, smaller than that of any command that asks for it; or that of the command whose
    /// answer has granted it: what was handed over before that was carried out before it.
    pub(crate) begun: u64,
    /// That of the grant, if it was told by an event. What is told of losses before that is about
    /// earlier ones; what was delivered behind it, and before anybody could read it, is about this
    /// one.
    pub(crate) granted: u64,
    /// Whether it is a guard's; otherwise that of a command under way, which may become a hold or
    /// gives back what was one.
    is_guarded: bool,
}

impl Usage {
    /// The whole lease, to be asked for now; or, where a hold is entered again that may not last
    /// for so long, as much as is left of it.
    pub(crate) fn lease(&self, now: Instant) -> Reserved {
        let target = &self.target;
        let (lease, _held) = target.ledger.with(|state| {
            let held = target.held(state);
            let mut live = held.iter().rev().filter(|hold| !hold.is_over(now));
            // One that is only being given back is gone before this is carried out.
            let is_shared = target.is_shared(state);
            let entered = live.find(|hold| is_shared && hold.target.shares_with(target));
            let whole = entered.map_or(self.options.lease, |hold| hold.lease_anew(now));
            (target.lease_in(state, whole, now), held)
        });
        lease
    }

    /// Whether another command has asked for a lease since the one of this number, which went into
    /// the queue. It may have been carried out behind the grant, before anybody knew of that, and
    /// have cut it short.
    pub(crate) fn may_have_been_cut(&self, queued: u64) -> bool {
        self.target.any_side(|side| side.asked > queued)
    }

    /// It is a guard's from now on.
    pub(super) fn settle(&mut self, state: &mut State) {
        self.is_guarded = true;
        self.target.each_side(state, |side| {
            side.guards = side.guards.saturating_add(1);
            if self.target.mode != Mode::Several {
                side.sharing = side.sharing.saturating_add(1);
                self.options = *side.options.get_or_insert(self.options);
            }
        });
    }

    /// Nobody knows whether it has been given back. What may be left ends with its lease.
    pub(crate) fn may_be_left(&self, now: Instant) {
        let until = now.checked_add(self.options.lease);
        self.target.change(|side| {
            side.has_more = true;
            side.left_until = side.left_until.max(until);
        });
    }

    /// It is that of a command under way again.
    pub(crate) fn give_back(&mut self) {
        if std::mem::take(&mut self.is_guarded) {
            let mode = self.target.mode;
            self.target.change(|side| side.lose_guard(mode));
        }
    }

    /// Whether what was granted for this may have been given back by mistake: a RELEASE without a
    /// token, meant for an earlier hold of which nobody here knew that it was lost, may have been
    /// carried out after the grant.
    pub(crate) fn may_have_been_released(&self) -> bool {
        let target = &self.target;
        target.ledger.with(|state| self.is_in_doubt(state))
    }

    pub(super) fn is_in_doubt(&self, state: &State) -> bool {
        !self.is_next && self.target.may_have_been_released(state, self.begun)
    }

    /// Why the server is to be asked about what was granted for this: word of a loss came since it
    /// was asked for, or it [may have been released](Self::may_have_been_released).
    pub(crate) fn doubt(&self) -> Option<LostReason> {
        let target = &self.target;
        target.ledger.with(|state| {
            let entries = state.entries(&target.entries);
            let mut told = entries.filter_map(|entry| entry.lost);
            let since = told.find(|(number, _)| *number > self.granted);
            let told = since.map(|(_, reason)| reason);
            told.or_else(|| self.is_in_doubt(state).then_some(LostReason::NotHeld))
        })
    }
}

impl Drop for Usage {
    fn drop(&mut self) {
        self.give_back();
        self.target.change(|side| {
            side.usages = side.usages.saturating_sub(1);
            if side.usages == 0 {
                (side.promised, side.count) = (None, 0);
                (side.last_token, side.counted_ahead) = (0, 0);
                (side.is_miscounted, side.has_more) = (false, false);
                side.reserved.clear();
            }
        });
    }
}

/// A RELEASE without a token: while there is one, it may be carried out, and take whatever its
/// owner is granted. One that is dropped may have been, up to then; a grant that was asked for
/// later is no longer in doubt.
///
/// Of a RELEASE there are two. One is dropped when it has been handed over, for what is handed over
/// later is carried out later, on the same connection. The other is dropped when it has been
/// answered, which is before what comes after it. Where it may have gone another way than what
/// came after it, that may have been granted before.
pub(crate) struct UnnamedRelease {
    target: Arc<Target>,
    /// Whether it is known to have been carried out before all that was handed over after it.
    pub(crate) in_order: bool,
}

impl UnnamedRelease {
    /// Nor will be.
    pub(crate) fn was_not_sent(mut self) {
        self.in_order = true;
    }
}

impl Drop for UnnamedRelease {
    fn drop(&mut self) {
        self.target.ledger.with(|state| {
            let number = state.number();
            self.target.each_side(state, |side| {
                side.unnamed_releases = side.unnamed_releases.saturating_sub(1);
                if !self.in_order {
                    side.unnamed_release = number;
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
    pub(crate) number: u64,
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
        let (since, length) = (self.lease.since, self.wanted);
        Lease { since, length }
    }

    /// The server has said yes: somebody is going to count on it.
    pub(crate) fn keep(self) -> Lease {
        self.answered(true)
    }

    /// The server has answered: whether with yes.
    pub(crate) fn answered(mut self, yes: bool) -> Lease {
        self.is_kept = yes;
        self.counted()
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.target.change(|side| {
            side.reserved.retain(|(number, _)| *number != self.number);
            if self.is_kept {
                side.promise(self.counted());
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ledger::Mailbox;

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
        let ledger = Arc::<Ledger>::default();
        let target = Owner::new("client", 1).target(&ledger, Mode::Plain, &names(&["name"]));
        let mut first = target.claim(LONG);
        assert_eq!(
            target.claim(SHORT).options,
            SHORT,
            "the first got nothing yet"
        );
        ledger.with(|state| first.settle(state));
        let mut second = target.claim(SHORT);
        assert_eq!(second.options, LONG);
        assert!(!first.target.is_alone());
        ledger.with(|state| second.settle(state));
        first.give_back();
        assert_eq!(target.claim(SHORT).options, LONG, "it is given back");
        drop(first);
        assert!(second.target.is_alone());
        assert_eq!(target.claim(SHORT).options, LONG);
        let waiting = target.claim(SHORT);
        drop(second);
        assert_eq!(target.claim(SHORT).options, SHORT);
        drop(waiting);
    }

    #[test]
    fn an_entry_is_shared_while_it_lasts_and_forgotten_after() {
        let owner = Owner::new("client", 1);
        let ledger = Arc::<Ledger>::default();
        let target = owner.target(&ledger, Mode::Plain, &names(&["name"]));
        let several = names(&["z", "name"]);
        let other = owner.clone().target(&ledger, Mode::Several, &several);
        assert_eq!(target.entries[0], other.entries[1]);
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
        assert!(reader.target.is_alone() && writer.target.is_alone());
        let at_rest = |usage: &Usage| ledger.with(|state| usage.target.is_at_rest(state));
        let several = usage(Mode::Several, &names(&["b", "c"]));
        assert!(several.target.is_alone());
        let mut plain = usage(Mode::Plain, &names(&["b"]));
        assert!(!several.target.is_alone() && !plain.target.is_alone());
        ledger.with(|state| plain.settle(state));
        assert!(!at_rest(&plain));
        drop(several);
        assert!(at_rest(&plain));
        plain.give_back();
        assert!(!at_rest(&plain));
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

    #[tokio::test(start_paused = true)]
    async fn what_is_given_back_settles_no_options() {
        let owner = Owner::new("client", 1);
        let ledger = Arc::<Ledger>::default();
        let target = owner.target(&ledger, Mode::Plain, &names(&["a"]));
        let mut guards = [target.claim(SHORT), target.claim(SHORT)];
        ledger.with(|state| guards.each_mut().map(|guard| guard.settle(state)));
        assert_eq!(target.claim(LONG).options.lease, SHORT.lease);
        let [first, second] = &mut guards;
        first.give_back();
        assert_eq!(target.claim(LONG).options.lease, SHORT.lease);
        second.give_back();
        assert_eq!(target.claim(LONG).options.lease, LONG.lease);
    }

    #[test]
    fn a_grant_that_its_event_tells_of_late_is_counted_by_the_first_answer() {
        let ledger = Arc::<Ledger>::default();
        let write = Owner::new("client", 1).target(&ledger, Mode::Write, &names(&["a"]));
        let _usage = write.claim(LONG);
        let mut mailbox = Mailbox::new(&write);
        assert!(!write.counted(2, 7), "the wait's is not heard of yet");
        assert!(write.counted(3, 7));
        write.released(Released::Left(2));
        assert!(!write.counted(1, 7), "its event");
        mailbox.close();
        assert!(write.counted(3, 7));
        write.released(Released::Left(2));
        // Both are lost, and nobody hears of it.
        assert!(!write.counted(1, 9));
        assert!(!write.counted(2, 9));
    }

    #[test]
    fn a_lease_asked_for_beside_a_wait_may_have_cut_it() {
        let owner = Owner::new("client", 1);
        let ledger = Arc::<Ledger>::default();
        let [both, one] = [
            owner.target(&ledger, Mode::Several, &names(&["b", "a"])),
            owner.target(&ledger, Mode::Plain, &names(&["a"])),
        ];
        let (waiting, beside) = (both.claim(LONG), one.claim(SHORT));
        let now = Instant::now();
        beside.lease(now).answered(true);
        let queued = || {
            let lease = waiting.lease(now);
            let number = lease.number;
            lease.answered(false);
            number
        };
        let first = queued();
        assert!(!waiting.may_have_been_cut(first));
        beside.lease(now).answered(true);
        assert!(waiting.may_have_been_cut(first));
        assert!(!waiting.may_have_been_cut(queued()));
    }
}
