//! Owners of locks: an owner is a value, not a thread.

use std::fmt::{self, Write as _};

use arrayvec::ArrayString;

/// The owner of a lock: the client's id and a number, `<client uuid>:<number>`.
///
/// Each `lock()` is its own owner, so two of them exclude each other even within one task, and the
/// server does not see that one caller made both. A [`Scope`](crate::Scope) takes all of its locks
/// for one owner, which is what most programs want. Where that does not fit, mint an owner with
/// [`Client::owner`](crate::Client::owner) and pass it on: whoever has it enters a lock again that
/// it already holds, and the last [`Guard`](crate::Guard) gives it back. Clones are the same
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
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Owner {
    pub(crate) name: OwnerName,
    /// Whether it is the owner of a kept lock, whose guards use it one after the other.
    pub(crate) is_kept: bool,
}

impl Owner {
    pub(crate) fn new(client: &str, number: u64) -> Self {
        let mut name = OwnerName::new();
        // There is room for both.
        let _ = write!(name, "{client}:{number}");
        Self {
            name,
            is_kept: false,
        }
    }

    /// The owner as the server knows it: the field of the lock's hash.
    pub fn as_str(&self) -> &str {
        &self.name
    }

    /// Whether the client with this id has minted it.
    pub(crate) fn is_of(&self, client: &str) -> bool {
        let number = self.name.strip_prefix(client);
        number.is_some_and(|number| number.starts_with(':'))
    }
}

/// A client's id, of 36 bytes, and a number. Every call has an owner: that needs no memory of its
/// own.
pub(crate) type OwnerName = ArrayString<64>;

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
