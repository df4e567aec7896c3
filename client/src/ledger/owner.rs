//! Who holds or waits: an owner is a value, not a thread.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use crate::ledger::entries::Ledger;
use crate::ledger::usage::Target;
use crate::wire::request::Mode;

/// Who holds a lock: the client's id and a number, `<client uuid>:<number>`.
///
/// Each `lock()` is its own owner, so two of them exclude each other even within one task, and the
/// server does not see that one caller made both. A [`Scope`](crate::Scope) takes all of its locks
/// for one owner, which is what most programs want. Where that does not fit, mint an owner with
/// [`Client::owner`](crate::Client::owner) and pass it on: whoever has it enters a lock again that
/// it already holds, and each [`Guard`](crate::Guard) gives back one hold. Clones are the same
/// owner.
///
/// An owner belongs to the client that minted it, and to its clones. With any other client it is
/// [refused](crate::Error::is_refused), and the server is not asked: two clients know nothing of
/// each other's holds, so that two guards could live off one.
///
/// The server refuses waits that would close a circle of owners who wait for each other. It sees
/// such a circle only if each of them holds and waits under one owner.
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

    /// What this owner takes in this mode, with the client of this ledger: one lock, or several.
    pub(crate) fn target(
        &self,
        ledger: &Arc<Ledger>,
        mode: Mode,
        names: &[Arc<[u8]>],
    ) -> Arc<Target> {
        Target::new(ledger, self, mode, names)
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
