//! What an owner has at a lock, or may have: its guards, and its commands that are under way.

use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::time::Instant;

use crate::ledger::entries::{Entries, EntryKey, Listeners};
use crate::ledger::hold::Hold;
use crate::ledger::owner::Owner;
use crate::locked;
use crate::time::{Lease, up_to_whole_millis};
use crate::wire::request::{Mode, Subject};

/// One owner at one lock; the same for all who have the owner.
pub(crate) struct Entry {
    entries: Arc<Entries>,
    key: EntryKey,
    /// Who is to hear of what the server tells about it.
    pub(crate) listeners: Listeners,
    /// An owner stands in a lock's queue once at a time, in whatever mode. CANCEL and events name
    /// the owner, not the wait: with two waits in line, undoing one would take out the other.
    permit: Permit,
    states: Mutex<States>,
}

/// Held by whoever stands in line.
pub(crate) type Permit = Arc<tokio::sync::Mutex<()>>;

/// An owner may read and write at once. Several locks at once are plain ones, each of them held as
/// if it had been taken alone.
#[derive(Default)]
struct States {
    plain: State,
    read: State,
    write: State,
}

impl States {
    fn of(&mut self, mode: Mode) -> &mut State {
        match mode {
            Mode::Plain | Mode::Several => &mut self.plain,
            Mode::Read => &mut self.read,
            Mode::Write => &mut self.write,
        }
    }
}

#[derive(Default)]
struct State {
    usages: usize,
    /// As many of them are guards'; the others are those of commands under way.
    guards: usize,
    options: Option<HoldOptions>,
    /// Until when somebody was promised the lock.
    promised: Option<Instant>,
    reservations: Reservations,
    hold: Weak<Hold>,
}

impl State {
    /// No lease that is asked for now may end before this.
    fn promised(&self) -> Option<Instant> {
        self.promised.max(self.reservations.latest())
    }
}

/// The ends of the leases that commands under way ask for, by the commands' numbers. Nearly always
/// there is one, for which nothing is allocated.
#[derive(Default)]
struct Reservations {
    one: Option<(u64, Instant)>,
    others: Vec<(u64, Instant)>,
}

impl Reservations {
    fn add(&mut self, number: u64, until: Instant) {
        if self.one.is_none() {
            self.one = Some((number, until));
        } else {
            self.others.push((number, until));
        }
    }

    fn remove(&mut self, number: u64) {
        self.one.take_if(|(one, _)| *one == number);
        self.others.retain(|(one, _)| *one != number);
    }

    fn latest(&self) -> Option<Instant> {
        let all = self.one.iter().chain(&self.others);
        all.map(|(_, until)| *until).max()
    }
}

impl Entry {
    pub(crate) fn new(entries: Arc<Entries>, key: EntryKey) -> Self {
        Self {
            entries,
            key,
            listeners: Listeners::default(),
            permit: Arc::default(),
            states: Mutex::default(),
        }
    }

    fn name(&self) -> &[u8] {
        &self.key.name
    }
}

impl Drop for Entry {
    fn drop(&mut self) {
        self.entries.left(&self.key);
    }
}

/// What an owner takes in one step: a lock in a mode, or several locks.
pub(crate) struct Target {
    mode: Mode,
    owner: Owner,
    /// As they were given.
    names: Box<[Arc<[u8]>]>,
    /// In the order of their names, in which permits are waited for: no two wait for each other.
    entries: Box<[Arc<Entry>]>,
}

impl Target {
    pub(crate) fn new(
        entries: &Arc<Entries>,
        owner: &Owner,
        mode: Mode,
        names: &[Arc<[u8]>],
    ) -> Arc<Self> {
        let here = names.iter().map(|name| entries.entry(owner, name));
        let mut here: Box<[_]> = here.collect();
        here.sort_unstable_by(|one, other| one.name().cmp(other.name()));
        Arc::new(Self {
            mode,
            owner: owner.clone(),
            names: names.into(),
            entries: here,
        })
    }

    /// The name by which it is routed: several locks that are taken in one command are at one node.
    pub(crate) fn key(&self) -> &[u8] {
        self.names.first().map_or(&[], |name| name)
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

    pub(crate) fn entries(&self) -> &[Arc<Entry>] {
        &self.entries
    }

    /// The entry of the first name, as they were given.
    pub(crate) fn first_entry(&self) -> Option<&Entry> {
        let first = self.names.first()?;
        let mut entries = self.entries.iter();
        entries
            .find(|entry| entry.name() == &**first)
            .map(|entry| &**entry)
    }

    /// What commands say that they are about.
    pub(crate) fn subject(&self) -> Subject<'_> {
        Subject {
            mode: self.mode,
            names: &self.names,
            owner: self.owner.as_bytes(),
        }
    }

    /// The permits to stand in line, in the order in which to wait for them.
    pub(crate) fn permits(&self) -> impl Iterator<Item = Permit> + '_ {
        self.entries.iter().map(|entry| Arc::clone(&entry.permit))
    }

    /// Counts one more hold, or one more command that may become or end one.
    ///
    /// At one lock the first usage settles the options for all until the last has gone, since they
    /// share a hold.
    pub(crate) fn usage(self: &Arc<Self>, asked: HoldOptions) -> Usage {
        let mut options = asked;
        for entry in &self.entries {
            let mut states = locked(&entry.states);
            let state = states.of(self.mode);
            state.usages = state.usages.saturating_add(1);
            if self.mode != Mode::Several {
                options = *state.options.get_or_insert(asked);
            }
        }
        Usage {
            target: Arc::clone(self),
            options,
            is_guards: false,
        }
    }

    /// A lease of this length, to be asked for now; or a longer one, if otherwise another guard of
    /// this owner were to lose a lock before the end that it counts on. Commands are carried out
    /// in the order in which they were handed over, so the one that is handed over next must
    /// promise no less than any before it, as long as that may have been granted.
    pub(crate) fn lease(self: &Arc<Self>, wanted: Duration) -> Reserved {
        let since = Instant::now();
        let mut length = wanted;
        for entry in &self.entries {
            let promised = locked(&entry.states).of(self.mode).promised();
            let left = promised.map(|until| until.saturating_duration_since(since));
            length = length.max(left.map_or(Duration::ZERO, up_to_whole_millis));
        }
        let lease = Lease { since, length };
        let first = self.entries.first();
        let number = first.map_or(0, |entry| entry.entries.next_number());
        for entry in &self.entries {
            let mut states = locked(&entry.states);
            let reservations = &mut states.of(self.mode).reservations;
            reservations.add(number, lease.ends());
        }
        Reserved {
            target: Arc::clone(self),
            number,
            lease,
            wanted,
        }
    }

    /// No lease that is asked for from now on ends before this one.
    pub(crate) fn promise(&self, lease: Lease) {
        for entry in &self.entries {
            let mut states = locked(&entry.states);
            let state = states.of(self.mode);
            // Once all has been given back nobody counts on it.
            if state.usages > 0 {
                state.promised = state.promised.max(Some(lease.ends()));
            }
        }
    }

    /// Whether there is at most one usage: nothing else of this owner is held or under way.
    ///
    /// Only then is it harmless to send an ACQUIRE or RELEASE twice: beside another guard, a second
    /// ACQUIRE ONCE would let two guards live off one hold, and a second RELEASE would take the
    /// other's.
    pub(crate) fn is_alone(&self) -> bool {
        let mut entries = self.entries.iter();
        entries.all(|entry| locked(&entry.states).of(self.mode).usages <= 1)
    }

    /// Whether no command is under way that may begin or end a hold of this owner there.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.entries.iter().all(|entry| {
            let mut states = locked(&entry.states);
            let state = states.of(self.mode);
            state.usages == state.guards
        })
    }

    /// Where its guards share a hold: at one lock.
    fn shared_entry(&self) -> Option<&Entry> {
        let entry = self.entries.first();
        let entry = entry.filter(|_| self.mode != Mode::Several);
        entry.map(|entry| &**entry)
    }

    /// The hold that is entered again, if there is one that is not lost.
    fn entered(&self) -> Option<Arc<Hold>> {
        let entry = self.shared_entry()?;
        let present = locked(&entry.states).of(self.mode).hold.upgrade();
        present.filter(|hold| hold.lost().is_none())
    }

    /// The hold with this token, shared by all guards that have it, or the new one. Whether the
    /// lease of the new one counts already: see [`Hold::take_over`].
    pub(crate) fn share(&self, granted: Arc<Hold>, acknowledged: bool) -> Arc<Hold> {
        let Some(entry) = self.shared_entry() else {
            return granted;
        };
        let mut states = locked(&entry.states);
        let shared = &mut states.of(self.mode).hold;
        if let Some(present) = shared.upgrade()
            && present.take_over(&granted, acknowledged)
        {
            return present;
        }
        *shared = Arc::downgrade(&granted);
        granted
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
    is_guards: bool,
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
    pub(crate) fn lease(&self) -> Reserved {
        let entered = self.target.entered();
        let whole = entered.map(|hold| hold.lease_anew(Instant::now()));
        self.target.lease(whole.unwrap_or(self.options.lease))
    }

    /// Whether nothing else of this owner is held or under way there.
    pub(crate) fn is_alone(&self) -> bool {
        self.target.is_alone()
    }

    /// Says that it is a guard's from now on, or again that of a command under way.
    pub(crate) fn is_guards(&mut self, is_guards: bool) {
        if self.is_guards == is_guards {
            return;
        }
        self.is_guards = is_guards;
        for entry in &self.target.entries {
            let mut states = locked(&entry.states);
            let guards = &mut states.of(self.target.mode).guards;
            *guards = if is_guards {
                guards.saturating_add(1)
            } else {
                guards.saturating_sub(1)
            };
        }
    }
}

impl Drop for Usage {
    fn drop(&mut self) {
        self.is_guards(false);
        for entry in &self.target.entries {
            let mut states = locked(&entry.states);
            let state = states.of(self.target.mode);
            state.usages = state.usages.saturating_sub(1);
            if state.usages == 0 {
                (state.options, state.promised) = (None, None);
                state.reservations = Reservations::default();
            }
        }
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
    pub(crate) fn keep(self) -> Lease {
        let counted = self.counted();
        self.target.promise(counted);
        counted
    }

    /// The server has answered: whether with yes.
    pub(crate) fn answered(self, yes: bool) -> Lease {
        if yes { self.keep() } else { self.counted() }
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        for entry in &self.target.entries {
            let mut states = locked(&entry.states);
            let state = states.of(self.target.mode);
            state.reservations.remove(self.number);
        }
    }
}

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
        let entries = Arc::default();
        let both = owner.target(&entries, Mode::Several, &names(&["b", "a"]));
        let one = owner.target(&entries, Mode::Plain, &names(&["a"]));
        let usages = [both.usage(LONG), one.usage(SHORT)];
        let asked_next = || one.lease(SHORT.lease).lease.length;
        let [refused, unanswered, granted] = [(); 3].map(|()| both.lease(LONG.lease));
        assert_eq!(asked_next(), LONG.lease, "any of them may be granted");
        refused.answered(false);
        drop(unanswered);
        assert_eq!(asked_next(), LONG.lease);
        let beside = one.lease(SHORT.lease);
        assert_eq!(beside.lease.length, LONG.lease);
        assert_eq!(beside.keep().length, SHORT.lease, "it counts on its own");
        granted.answered(true);
        assert_eq!(asked_next(), LONG.lease);
        drop(usages);
        let usages = [both.usage(LONG), one.usage(SHORT)];
        let late = both.lease(LONG.lease);
        both.lease(LONG.lease).answered(false);
        assert_eq!(asked_next(), LONG.lease);
        drop(usages);
        late.answered(true);
        assert_eq!(asked_next(), SHORT.lease, "nobody counts on it any more");
    }

    #[test]
    fn the_first_claim_settles_the_terms_until_the_last_has_gone() {
        let target =
            Owner::new("client", 1).target(&Arc::default(), Mode::Plain, &names(&["name"]));
        let first = target.usage(LONG);
        let second = target.usage(SHORT);
        assert_eq!(second.options(), LONG);
        assert!(!first.is_alone());
        drop(first);
        assert!(second.is_alone());
        assert_eq!(target.usage(SHORT).options(), LONG);
        drop(second);
        assert_eq!(target.usage(SHORT).options(), SHORT);
    }

    #[test]
    fn a_place_is_shared_while_it_lasts_and_forgotten_after() {
        let owner = Owner::new("client", 1);
        let entries = Arc::default();
        let target = owner.target(&entries, Mode::Plain, &names(&["name"]));
        let several = names(&["z", "name"]);
        let other = owner.clone().target(&entries, Mode::Several, &several);
        assert!(Arc::ptr_eq(&target.entries[0], &other.entries[0]));
        let first = other.first_entry().expect("the entry of z");
        assert!(std::ptr::eq(first, &raw const *other.entries[1]));
        drop((target, other));
        assert!(entries.is_empty());
    }

    #[test]
    fn who_reads_is_alone_beside_who_writes_but_one_of_several_is_not_beside_the_same_lock() {
        let owner = Owner::new("client", 1);
        let entries = Arc::default();
        let usage = |mode, names: &[Arc<[u8]>]| owner.target(&entries, mode, names).usage(LONG);
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
        let entries = Arc::default();
        let both = owner.target(&entries, Mode::Several, &names(&["b", "a"]));
        let one = owner.target(&entries, Mode::Plain, &names(&["a"]));
        let usages = [both.usage(LONG), one.usage(SHORT)];
        let first = both.lease(LONG.lease);
        assert_eq!(first.lease.length, LONG.lease);
        tokio::time::advance(Duration::from_secs(10)).await;
        let second = one.lease(SHORT.lease);
        assert_eq!(second.lease.length, Duration::from_secs(20));
        assert!(second.lease.ends() >= first.lease.ends());
        let reader = owner.target(&entries, Mode::Read, &names(&["a"]));
        assert_eq!(reader.lease(SHORT.lease).lease.length, SHORT.lease);
        drop(usages);
        assert_eq!(one.lease(SHORT.lease).lease.length, SHORT.lease);
    }
}
