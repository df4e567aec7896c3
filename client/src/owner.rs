//! Who holds or waits: an owner is a value, not a thread.

use std::collections::HashMap;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

use crate::hold::Hold;
use crate::locked;

/// Who holds a lock: the client's id and a number, `<client uuid>:<number>`.
///
/// Each `lock()` is its own owner, so two of them exclude each other even within one task. For
/// re-entrance, mint an owner with [`Client::owner`](crate::Client::owner) and pass it on: whoever
/// has it enters a lock again that it already holds, and each [`Guard`](crate::Guard) gives back
/// one hold. Clones are the same owner.
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
    inner: Arc<Inner>,
}

struct Inner {
    text: Box<str>,
    places: Mutex<HashMap<Arc<[u8]>, Weak<Place>>>,
}

impl Owner {
    pub(crate) fn new(client: &str, number: u64) -> Self {
        let text = format!("{client}:{number}").into_boxed_str();
        Self {
            inner: Arc::new(Inner {
                text,
                places: Mutex::default(),
            }),
        }
    }

    /// The owner as the server knows it: the field of the lock's hash.
    pub fn as_str(&self) -> &str {
        &self.inner.text
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        self.inner.text.as_bytes()
    }

    /// What this owner has at one lock; the same for all who have the owner.
    pub(crate) fn place(&self, name: &Arc<[u8]>) -> Arc<Place> {
        let mut places = locked(&self.inner.places);
        if let Some(place) = places.get(name).and_then(Weak::upgrade) {
            return place;
        }
        let place = Arc::new(Place {
            owner: self.clone(),
            name: Arc::clone(name),
            turn: Arc::default(),
            state: Mutex::default(),
        });
        places.insert(Arc::clone(name), Arc::downgrade(&place));
        place
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

/// One owner at one lock.
pub(crate) struct Place {
    pub(crate) owner: Owner,
    pub(crate) name: Arc<[u8]>,
    /// An owner stands in a lock's queue once at a time. CANCEL and ONCE name the owner, not the
    /// wait: with two waits in line, undoing one would take out the other.
    pub(crate) turn: Arc<tokio::sync::Mutex<()>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    claims: usize,
    terms: Option<Terms>,
    hold: Weak<Hold>,
}

impl Place {
    /// Counts one more hold, or one more command that may become or end one.
    ///
    /// The first claim settles the terms for all until the last has gone: were an owner to enter
    /// again with a shorter lease, the server would end the hold before its first guard, which
    /// was promised the longer one, could know.
    pub(crate) fn claim(self: &Arc<Self>, asked: Terms) -> Claim {
        let mut state = locked(&self.state);
        state.claims = state.claims.saturating_add(1);
        let terms = *state.terms.get_or_insert(asked);
        Claim {
            place: Arc::clone(self),
            terms,
        }
    }

    /// The hold with this token, shared by all guards that have it, or the new one.
    pub(crate) fn share(&self, granted: Arc<Hold>) -> Arc<Hold> {
        let mut state = locked(&self.state);
        if let Some(present) = state.hold.upgrade()
            && present.take_over(&granted)
        {
            return present;
        }
        state.hold = Arc::downgrade(&granted);
        granted
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut places = locked(&self.owner.inner.places);
        // Another place may have taken this name since the last handle of this one went.
        if places
            .get(&self.name)
            .is_some_and(|place| place.strong_count() == 0)
        {
            places.remove(&self.name);
        }
    }
}

/// The right to say that this owner may have something at this lock.
pub(crate) struct Claim {
    place: Arc<Place>,
    terms: Terms,
}

impl Claim {
    pub(crate) fn place(&self) -> &Arc<Place> {
        &self.place
    }

    pub(crate) fn name(&self) -> &Arc<[u8]> {
        &self.place.name
    }

    pub(crate) fn owner(&self) -> &Owner {
        &self.place.owner
    }

    pub(crate) fn terms(&self) -> Terms {
        self.terms
    }

    /// Whether nothing else of this owner is held or under way at this lock. Only then is it
    /// harmless to send its ACQUIRE or RELEASE twice: beside another guard, a second ACQUIRE ONCE
    /// would let two guards live off one hold, and a second RELEASE would take the other's.
    pub(crate) fn is_alone(&self) -> bool {
        locked(&self.place.state).claims == 1
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let mut state = locked(&self.place.state);
        state.claims = state.claims.saturating_sub(1);
        if state.claims == 0 {
            state.terms = None;
        }
    }
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
    }

    #[test]
    fn the_first_claim_settles_the_terms_until_the_last_has_gone() {
        let place = Owner::new("client", 1).place(&Arc::from(*b"name"));
        let first = place.claim(LONG);
        let second = place.claim(SHORT);
        assert_eq!(second.terms(), LONG);
        assert!(!first.is_alone());
        drop(first);
        assert!(second.is_alone());
        assert_eq!(place.claim(SHORT).terms(), LONG);
        drop(second);
        assert_eq!(place.claim(SHORT).terms(), SHORT);
    }

    #[test]
    fn a_place_is_shared_while_it_lasts_and_forgotten_after() {
        let owner = Owner::new("client", 1);
        let name = Arc::from(*b"name");
        let place = owner.place(&name);
        assert!(Arc::ptr_eq(&place, &owner.clone().place(&name)));
        drop(place);
        assert!(locked(&owner.inner.places).is_empty());
    }
}
