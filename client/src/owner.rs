//! Who holds or waits: an owner is a value, not a thread.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::time::Instant;

use crate::command::Subject;
use crate::hold::{Hold, whole_millis};
use crate::locked;
use crate::mode::Mode;
use crate::registry::{Ears, Registry, Spot};

/// Who holds a lock: the client's id and a number, `<client uuid>:<number>`.
///
/// Each `lock()` is its own owner, so two of them exclude each other even within one task. For
/// re-entrance, mint an owner with [`Client::owner`](crate::Client::owner) and pass it on: whoever
/// has it enters a lock again that it already holds, and each [`Guard`](crate::Guard) gives back
/// one hold. Clones are the same owner.
///
/// An owner belongs to the client that minted it, and to its clones. With any other client it is
/// [refused](crate::Error::is_refused), and the server is not asked: two clients know nothing of
/// each other's holds, so that two guards could live off one.
///
/// The server looks for circles of owners that wait for each other, so calls that are made while
/// something is held are seen to be deadlocks only if they are made for the holder.
///
/// # Examples
///
/// ```no_run
/// # async fn example(client: rlock_client::Client) -> Result<(), rlock_client::Error> {
/// let owner = client.owner();
/// let outer = client.lock("orders").owner(&owner).lock().await?;
/// let inner = client.lock("orders").owner(&owner).lock().await?;
/// assert_eq!(outer.token(), inner.token());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Owner {
    text: Arc<str>,
}

impl Owner {
    pub(crate) fn new(client: &str, number: u64) -> Self {
        let number = number.to_string();
        // Half of what it costs to format it: every call has an owner.
        let text = [client, ":", &number].concat().into();
        Self { text }
    }

    /// The owner as the server knows it: the field of the lock's hash.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether the client with this id has minted it.
    pub(crate) fn is_of(&self, client: &str) -> bool {
        let number = self.text.strip_prefix(client);
        number.is_some_and(|number| number.starts_with(':'))
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.text.as_bytes()
    }

    /// The same, to be kept.
    pub(crate) fn to_bytes(&self) -> Arc<[u8]> {
        Arc::clone(&self.text).into()
    }

    /// What this owner takes in this mode, with the client of this registry: one lock, or several.
    pub(crate) fn target(
        &self,
        registry: &Arc<Registry>,
        mode: Mode,
        names: &[Arc<[u8]>],
    ) -> Arc<Target> {
        let places = names.iter().map(|name| registry.place(self, name));
        let mut places: Box<[_]> = places.collect();
        places.sort_unstable_by(|one, other| one.name().cmp(other.name()));
        Arc::new(Target {
            mode,
            owner: self.clone(),
            names: names.into(),
            places,
        })
    }
}

impl fmt::Debug for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Owner").field(&self.as_str()).finish()
    }
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl PartialEq for Owner {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for Owner {}

impl Hash for Owner {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.as_str().hash(state);
    }
}

/// One owner at one lock; the same for all who have the owner.
pub(crate) struct Place {
    registry: Arc<Registry>,
    spot: Spot,
    /// Who is to hear of what the server tells about it.
    pub(crate) ears: Ears,
    /// An owner stands in a lock's queue once at a time, in whatever mode. CANCEL and events name
    /// the owner, not the wait: with two waits in line, undoing one would take out the other.
    turn: Turn,
    states: Mutex<States>,
}

/// Held by whoever stands in line.
pub(crate) type Turn = Arc<tokio::sync::Mutex<()>>;

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
    claims: usize,
    /// As many of them are guards'; the others are those of commands under way.
    guards: usize,
    terms: Option<Terms>,
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

impl Place {
    pub(crate) fn new(registry: Arc<Registry>, spot: Spot) -> Self {
        Self {
            registry,
            spot,
            ears: Ears::default(),
            turn: Arc::default(),
            states: Mutex::default(),
        }
    }

    fn name(&self) -> &[u8] {
        &self.spot.name
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.registry.left(&self.spot);
    }
}

/// What an owner takes in one step: a lock in a mode, or several locks.
pub(crate) struct Target {
    mode: Mode,
    owner: Owner,
    /// As they were given.
    names: Box<[Arc<[u8]>]>,
    /// In the order of their names, in which turns are waited for: no two wait for each other.
    places: Box<[Arc<Place>]>,
}

impl Target {
    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    pub(crate) fn owner(&self) -> &Owner {
        &self.owner
    }

    pub(crate) fn names(&self) -> &[Arc<[u8]>] {
        &self.names
    }

    pub(crate) fn places(&self) -> &[Arc<Place>] {
        &self.places
    }

    /// The place of the first name, as they were given.
    pub(crate) fn first_place(&self) -> Option<&Place> {
        let first = self.names.first()?;
        let mut places = self.places.iter();
        places
            .find(|place| place.name() == &**first)
            .map(|place| &**place)
    }

    /// What commands say that they are about.
    pub(crate) fn subject(&self) -> Subject<'_> {
        Subject {
            mode: self.mode,
            names: &self.names,
            owner: self.owner.as_bytes(),
        }
    }

    /// The turns to stand in line, in the order in which to wait for them.
    pub(crate) fn turns(&self) -> impl Iterator<Item = Turn> + '_ {
        self.places.iter().map(|place| Arc::clone(&place.turn))
    }

    /// Counts one more hold, or one more command that may become or end one.
    ///
    /// At one lock the first claim settles the terms for all until the last has gone, since they
    /// share a hold.
    pub(crate) fn claim(self: &Arc<Self>, asked: Terms) -> Claim {
        let mut terms = asked;
        for place in &self.places {
            let mut states = locked(&place.states);
            let state = states.of(self.mode);
            state.claims = state.claims.saturating_add(1);
            if self.mode != Mode::Several {
                terms = *state.terms.get_or_insert(asked);
            }
        }
        Claim {
            target: Arc::clone(self),
            terms,
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
        for place in &self.places {
            let promised = locked(&place.states).of(self.mode).promised();
            let left = promised.map(|until| until.saturating_duration_since(since));
            length = length.max(left.map_or(Duration::ZERO, millis_up));
        }
        let lease = Lease { since, length };
        let first = self.places.first();
        let number = first.map_or(0, |place| place.registry.next_number());
        for place in &self.places {
            let mut states = locked(&place.states);
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
        for place in &self.places {
            let mut states = locked(&place.states);
            let state = states.of(self.mode);
            // Once all has been given back nobody counts on it.
            if state.claims > 0 {
                state.promised = state.promised.max(Some(lease.ends()));
            }
        }
    }

    /// Whether there is at most one claim: nothing else of this owner is held or under way.
    ///
    /// Only then is it harmless to send an ACQUIRE or RELEASE twice: beside another guard, a second
    /// ACQUIRE ONCE would let two guards live off one hold, and a second RELEASE would take the
    /// other's.
    pub(crate) fn is_alone(&self) -> bool {
        let mut places = self.places.iter();
        places.all(|place| locked(&place.states).of(self.mode).claims <= 1)
    }

    /// Whether no command is under way that may begin or end a hold of this owner there.
    pub(crate) fn is_at_rest(&self) -> bool {
        self.places.iter().all(|place| {
            let mut states = locked(&place.states);
            let state = states.of(self.mode);
            state.claims == state.guards
        })
    }

    /// Where its guards share a hold: at one lock.
    fn shared_place(&self) -> Option<&Place> {
        let place = self.places.first();
        let place = place.filter(|_| self.mode != Mode::Several);
        place.map(|place| &**place)
    }

    /// The hold that is entered again, if there is one that is not lost.
    fn entered(&self) -> Option<Arc<Hold>> {
        let place = self.shared_place()?;
        let present = locked(&place.states).of(self.mode).hold.upgrade();
        present.filter(|hold| hold.lost().is_none())
    }

    /// The hold with this token, shared by all guards that have it, or the new one.
    pub(crate) fn share(&self, granted: Arc<Hold>) -> Arc<Hold> {
        let Some(place) = self.shared_place() else {
            return granted;
        };
        let mut states = locked(&place.states);
        let shared = &mut states.of(self.mode).hold;
        if let Some(present) = shared.upgrade()
            && present.take_over(&granted)
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
pub(crate) struct Claim {
    target: Arc<Target>,
    terms: Terms,
    is_guards: bool,
}

impl Claim {
    pub(crate) fn target(&self) -> &Arc<Target> {
        &self.target
    }

    pub(crate) fn terms(&self) -> Terms {
        self.terms
    }

    /// The whole lease, to be asked for now; or, where a hold is entered again that may not last
    /// for so long, as much as is left of it.
    pub(crate) fn lease(&self) -> Reserved {
        let entered = self.target.entered();
        let whole = entered.map(|hold| hold.lease_anew(Instant::now()));
        self.target.lease(whole.unwrap_or(self.terms.lease))
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
        for place in &self.target.places {
            let mut states = locked(&place.states);
            let guards = &mut states.of(self.target.mode).guards;
            *guards = if is_guards {
                guards.saturating_add(1)
            } else {
                guards.saturating_sub(1)
            };
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        self.is_guards(false);
        for place in &self.target.places {
            let mut states = locked(&place.states);
            let state = states.of(self.target.mode);
            state.claims = state.claims.saturating_sub(1);
            if state.claims == 0 {
                (state.terms, state.promised) = (None, None);
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
        for place in &self.target.places {
            let mut states = locked(&place.states);
            let state = states.of(self.target.mode);
            state.reservations.remove(self.number);
        }
    }
}

/// A lease that is asked for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Lease {
    /// When the command was made that asks for it, so not after it was sent: the server starts the
    /// lease later.
    pub(crate) since: Instant,
    pub(crate) length: Duration,
}

impl Lease {
    /// Its end, if the server's clock runs like ours.
    pub(crate) fn ends(&self) -> Instant {
        self.since.checked_add(self.length).unwrap_or(self.since)
    }
}

fn millis_up(left: Duration) -> Duration {
    whole_millis(left.saturating_add(Duration::from_nanos(999_999)))
}

/// What a hold is taken for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Terms {
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

    const LONG: Terms = Terms {
        lease: Duration::from_secs(30),
        renewed: true,
        max_hold: None,
    };
    const SHORT: Terms = Terms {
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
        let registry = Arc::default();
        let both = owner.target(&registry, Mode::Several, &names(&["b", "a"]));
        let one = owner.target(&registry, Mode::Plain, &names(&["a"]));
        let claims = [both.claim(LONG), one.claim(SHORT)];
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
        drop(claims);
        let claims = [both.claim(LONG), one.claim(SHORT)];
        let late = both.lease(LONG.lease);
        both.lease(LONG.lease).answered(false);
        assert_eq!(asked_next(), LONG.lease);
        drop(claims);
        late.answered(true);
        assert_eq!(asked_next(), SHORT.lease, "nobody counts on it any more");
    }

    #[test]
    fn the_first_claim_settles_the_terms_until_the_last_has_gone() {
        let target =
            Owner::new("client", 1).target(&Arc::default(), Mode::Plain, &names(&["name"]));
        let first = target.claim(LONG);
        let second = target.claim(SHORT);
        assert_eq!(second.terms(), LONG);
        assert!(!first.is_alone());
        drop(first);
        assert!(second.is_alone());
        assert_eq!(target.claim(SHORT).terms(), LONG);
        drop(second);
        assert_eq!(target.claim(SHORT).terms(), SHORT);
    }

    #[test]
    fn a_place_is_shared_while_it_lasts_and_forgotten_after() {
        let owner = Owner::new("client", 1);
        let registry = Arc::default();
        let target = owner.target(&registry, Mode::Plain, &names(&["name"]));
        let several = names(&["z", "name"]);
        let other = owner.clone().target(&registry, Mode::Several, &several);
        assert!(Arc::ptr_eq(&target.places[0], &other.places[0]));
        let first = other.first_place().expect("the place of z");
        assert!(std::ptr::eq(first, &raw const *other.places[1]));
        drop((target, other));
        assert!(registry.is_empty());
    }

    #[test]
    fn who_reads_is_alone_beside_who_writes_but_one_of_several_is_not_beside_the_same_lock() {
        let owner = Owner::new("client", 1);
        let registry = Arc::default();
        let claim = |mode, names: &[Arc<[u8]>]| owner.target(&registry, mode, names).claim(LONG);
        let reader = claim(Mode::Read, &names(&["a"]));
        let writer = claim(Mode::Write, &names(&["a"]));
        assert!(reader.is_alone() && writer.is_alone());
        let several = claim(Mode::Several, &names(&["b", "c"]));
        assert!(several.is_alone());
        let mut plain = claim(Mode::Plain, &names(&["b"]));
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
        let registry = Arc::default();
        let both = owner.target(&registry, Mode::Several, &names(&["b", "a"]));
        let one = owner.target(&registry, Mode::Plain, &names(&["a"]));
        let claims = [both.claim(LONG), one.claim(SHORT)];
        let first = both.lease(LONG.lease);
        assert_eq!(first.lease.length, LONG.lease);
        tokio::time::advance(Duration::from_secs(10)).await;
        let second = one.lease(SHORT.lease);
        assert_eq!(second.lease.length, Duration::from_secs(20));
        assert!(second.lease.ends() >= first.lease.ends());
        let reader = owner.target(&registry, Mode::Read, &names(&["a"]));
        assert_eq!(reader.lease(SHORT.lease).lease.length, SHORT.lease);
        drop(claims);
        assert_eq!(one.lease(SHORT.lease).lease.length, SHORT.lease);
    }
}
