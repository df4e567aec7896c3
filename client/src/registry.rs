//! Who is to hear of what the servers tell: the waits and the holds of a client, by name and owner.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::command::{self, Command, Event, News, Released, Subject};
use crate::hold::{Hold, LostReason};
use crate::locked;
use crate::mode::Mode;
use crate::node::Node;
use crate::nodes::Nodes;
use crate::owner::{Claim, Target, Terms};

/// One client's waits and holds, at whatever node they are: a lock may move from one to another.
#[derive(Default)]
pub(crate) struct Registry {
    waits: Mutex<HashMap<Spot, Arc<Letters>>>,
    /// An owner may have several at a spot: as a reader and as a writer, or with other locks.
    holds: Mutex<HashMap<Spot, Vec<Weak<Hold>>>>,
}

/// An owner at a lock, as events name it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct Spot {
    name: Arc<[u8]>,
    owner: Arc<[u8]>,
}

/// The spots of several locks are as many.
fn spots(target: &Target) -> impl Iterator<Item = Spot> + '_ {
    target.names().iter().map(|name| Spot {
        name: Arc::clone(name),
        owner: target.owner().to_bytes(),
    })
}

/// What has been told to a wait and not been read.
#[derive(Default)]
struct Letters {
    unread: Mutex<VecDeque<Told>>,
    arrived: Notify,
}

/// News for a wait.
pub(crate) struct Told {
    pub(crate) news: News,
    /// It has not happened before this.
    pub(crate) since: Instant,
    /// Who told it.
    pub(crate) by: Arc<Node>,
}

/// What is left to do about an event that was delivered.
pub(crate) enum Delivered {
    /// Whom it concerned has it.
    Done,
    /// A loss, with the holds that it may be about: the event does not say which of them it is, nor
    /// whether it is an earlier one of the owner.
    Lost(Vec<Arc<Hold>>, LostReason),
    /// A grant that nobody waits for, and the command that gives it back.
    Stray(Stray),
}

/// How to give back what was granted to nobody.
pub(crate) struct Stray {
    pub(crate) name: Arc<[u8]>,
    pub(crate) release: Command<Released>,
}

impl Registry {
    /// Listens for news of a wait, from now on. There is one wait of an owner at a lock at a time.
    pub(crate) fn listen(self: &Arc<Self>, nodes: &Arc<Nodes>, claim: &Claim) -> Mailbox {
        let letters = Arc::default();
        let mut waits = locked(&self.waits);
        for spot in spots(claim.target()) {
            waits.insert(spot, Arc::clone(&letters));
        }
        Mailbox {
            registry: Arc::clone(self),
            nodes: Arc::clone(nodes),
            target: Arc::clone(claim.target()),
            terms: claim.terms(),
            letters,
        }
    }

    /// Counts this hold among those of the client.
    pub(crate) fn keep(&self, hold: &Arc<Hold>) {
        let mut holds = locked(&self.holds);
        for spot in spots(hold.target()) {
            holds.entry(spot).or_default().push(Arc::downgrade(hold));
        }
    }

    /// A hold of this has gone.
    pub(crate) fn forget(&self, target: &Target) {
        let mut holds = locked(&self.holds);
        for spot in spots(target) {
            if let Entry::Occupied(mut here) = holds.entry(spot) {
                here.get_mut().retain(|hold| hold.strong_count() > 0);
                if here.get().is_empty() {
                    here.remove();
                }
            }
        }
    }

    /// All holds that have guards.
    pub(crate) fn holds(&self) -> Vec<Arc<Hold>> {
        let holds = locked(&self.holds);
        let all = holds.values().flatten().filter_map(Weak::upgrade);
        let mut all: Vec<_> = all.collect();
        drop(holds);
        // Of several locks at once it is the same one at each.
        all.sort_unstable_by_key(Arc::as_ptr);
        all.dedup_by(|one, other| Arc::ptr_eq(one, other));
        all
    }

    /// Whether there are no holds at all.
    pub(crate) fn is_idle(&self) -> bool {
        locked(&self.holds).is_empty()
    }

    fn holds_at(&self, spot: &Spot) -> Vec<Arc<Hold>> {
        let holds = locked(&self.holds);
        let here = holds.get(spot).into_iter().flatten();
        here.filter_map(Weak::upgrade).collect()
    }

    /// The owner has been granted this with a new token, and had nothing of it before: what it was
    /// granted earlier is over, but for a writer who now reads too. Of holds that the server tells
    /// apart by their tokens it says so itself.
    pub(crate) fn supersede(&self, target: &Target, token: u64) {
        for hold in spots(target).flat_map(|spot| self.holds_at(&spot)) {
            let mode = hold.target().mode();
            let beside = (mode, target.mode()) == (Mode::Write, Mode::Read);
            if !beside && !mode.has_token() && hold.token() != token {
                hold.lose(LostReason::NotHeld);
            }
        }
    }

    /// Brings an event to whom it concerns.
    pub(crate) fn deliver(&self, event: Event, since: Instant, by: &Arc<Node>) -> Delivered {
        let Event { name, owner, news } = event;
        let spot = Spot {
            name: name.into(),
            owner: owner.into(),
        };
        if let News::Lost(reason) = news {
            let mut holds = self.holds_at(&spot);
            holds.retain(|hold| hold.lost().is_none());
            if !holds.is_empty() {
                return Delivered::Lost(holds, reason);
            }
        }
        let waits = locked(&self.waits);
        let Some(wait) = waits.get(&spot) else {
            drop(waits);
            return self.stray(&spot, &news);
        };
        // Under the lock: a mailbox that goes away now finds the letter when it looks through
        // what was not read.
        let by = Arc::clone(by);
        locked(&wait.unread).push_back(Told { news, since, by });
        wait.arrived.notify_one();
        Delivered::Done
    }

    /// News for which nobody listens. A wait is heard to its end, so it is not one of ours: what it
    /// was for is not known, and the token says what to give back if it was one plain lock.
    fn stray(&self, spot: &Spot, news: &News) -> Delivered {
        let subject = Subject {
            mode: Mode::Plain,
            names: &[Arc::clone(&spot.name)],
            owner: &spot.owner,
        };
        let stray = self.undeliverable(spot, subject, None, news);
        stray.map_or(Delivered::Done, Delivered::Stray)
    }

    /// A grant that nobody waits for is to be given back, unless a reply has brought the same grant
    /// before. All else is of no use to anybody.
    fn undeliverable(
        &self,
        spot: &Spot,
        subject: Subject<'_>,
        lease: Option<Duration>,
        news: &News,
    ) -> Option<Stray> {
        let News::Granted { token } = *news else {
            return None;
        };
        let mut known = self.holds_at(spot).into_iter();
        if known.any(|hold| hold.token() == token) {
            return None;
        }
        Some(Stray {
            name: Arc::clone(&spot.name),
            release: command::release(subject, Some(token), lease),
        })
    }
}

/// What a wait hears. What it has not read when it goes is given back.
pub(crate) struct Mailbox {
    registry: Arc<Registry>,
    nodes: Arc<Nodes>,
    target: Arc<Target>,
    terms: Terms,
    letters: Arc<Letters>,
}

impl Mailbox {
    /// Waits for news.
    pub(crate) async fn next(&mut self) -> Told {
        loop {
            // A letter that arrives after the look leaves a word that ends the wait at once.
            match self.here() {
                Some(told) => return told,
                None => self.letters.arrived.notified().await,
            }
        }
    }

    /// News that is here already.
    pub(crate) fn here(&mut self) -> Option<Told> {
        locked(&self.letters.unread).pop_front()
    }
}

impl Drop for Mailbox {
    fn drop(&mut self) {
        let target = Arc::clone(&self.target);
        let mut waits = locked(&self.registry.waits);
        for spot in spots(&target) {
            waits.remove(&spot);
        }
        drop(waits);
        // Grants of several locks are told under the first.
        let Some(spot) = spots(&target).next() else {
            return;
        };
        while let Some(told) = self.here() {
            // Were the lease of a reader not to start anew, the entry that goes could be that of
            // another guard, and the others end earlier.
            let lease = Some(self.terms.lease);
            let subject = target.subject();
            let stray = self
                .registry
                .undeliverable(&spot, subject, lease, &told.news);
            if let Some(stray) = stray {
                self.nodes.give_back(stray);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::connection::Connector;
    use crate::hold::Grant;
    use crate::node::Identity;
    use crate::owner::Owner;
    use crate::place::{Certificates, Place};
    use crate::session::Attachment;
    use tokio::runtime::Handle;

    /// A node where nobody is.
    fn nobody() -> Arc<Node> {
        let second = Duration::from_secs(1);
        let place = Place::new("redis+unix:///nowhere", &[], &Certificates::default());
        let connector = Connector::new(place.expect("a URL"), second);
        let identity = Identity {
            session: "client".into(),
            grace: second,
            copies: None,
        };
        Node::start(&Handle::current(), connector, identity, Weak::new())
    }

    /// A hold of this client, with its claim.
    fn hold(
        registry: &Arc<Registry>,
        owner: &Owner,
        mode: Mode,
        names: &[&str],
    ) -> (Arc<Hold>, Claim) {
        let names: Vec<_> = names.iter().map(|n| Arc::from(n.as_bytes())).collect();
        let claim = owner.target(mode, &names).claim(Terms {
            lease: Duration::from_secs(30),
            renewed: true,
            max_hold: None,
        });
        let since = Instant::now();
        let grant = Grant {
            token: 7,
            lease: claim.lease(),
            attachment: Attachment::new(since, Duration::ZERO),
            fresh: true,
        };
        let hold = Hold::new(registry, &claim, grant);
        registry.keep(&hold);
        (hold, claim)
    }

    #[tokio::test]
    async fn a_fresh_grant_says_that_earlier_ones_without_a_token_are_lost() {
        let registry = Arc::new(Registry::default());
        let (owner, other) = (Owner::new("client", 1), Owner::new("client", 2));
        let hold = |owner, mode, names: &[&str]| hold(&registry, owner, mode, names);
        let is_lost = |(hold, _): &(Arc<Hold>, Claim)| hold.lost().is_some();

        let writer = hold(&owner, Mode::Write, &["a"]);
        let reader = hold(&owner, Mode::Read, &["a"]);
        registry.supersede(reader.1.target(), 8);
        assert!(!is_lost(&writer), "a writer may read");
        registry.supersede(writer.1.target(), 7);
        assert!(!is_lost(&writer), "the same grant, told twice");
        registry.supersede(writer.1.target(), 8);
        assert!(is_lost(&writer));
        assert!(!is_lost(&reader), "the server will say so");

        let both = hold(&owner, Mode::Several, &["b", "c"]);
        let next = hold(&owner, Mode::Several, &["d"]);
        let others = hold(&other, Mode::Several, &["c", "b"]);
        let one = hold(&owner, Mode::Plain, &["c"]);
        registry.supersede(one.1.target(), 8);
        assert!(is_lost(&both) && !is_lost(&next) && !is_lost(&others));
    }

    #[tokio::test]
    async fn holds_are_counted_once_each_and_forgotten_when_they_go() {
        let registry = Arc::new(Registry::default());
        let owner = Owner::new("client", 1);
        let both = hold(&registry, &owner, Mode::Several, &["b", "c"]);
        let one = hold(&registry, &owner, Mode::Plain, &["c"]);
        assert_eq!(registry.holds().len(), 2);
        let node = nobody();
        let concerned = |name: &str| {
            let event = Event {
                name: name.into(),
                owner: owner.as_bytes().to_vec(),
                news: News::Lost(LostReason::Broken),
            };
            match registry.deliver(event, Instant::now(), &node) {
                Delivered::Lost(holds, LostReason::Broken) => holds.len(),
                _ => 0,
            }
        };
        assert_eq!(concerned("c"), 2, "which of them it was is to be asked");
        drop(one);
        assert_eq!(concerned("c"), 1);
        both.0.lose(LostReason::Broken);
        assert_eq!(concerned("b"), 0);
        drop(both);
        assert!(locked(&registry.holds).is_empty());
    }
}
