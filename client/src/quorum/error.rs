//! The error of a call to a quorum, server by server.

use std::fmt;

use crate::error::{Error, ErrorKind, kinds};

/// Why a call to a quorum failed, and what each server answered.
///
/// The [kind](Self::kind) says what a caller may conclude, as with [`Error`]:
/// - [not acquired](Self::is_not_acquired): enough servers answered, and too many of them said that
///   somebody else has the lock. Nothing is held.
/// - [lost](Self::is_lost): fewer than a majority still held it. Somebody else may have it since.
/// - [unavailable](Self::is_unavailable): too few servers could be asked, or answered in time. If
///   the call was to take the lock, nothing is held.
/// - [`Unknown`](ErrorKind::Unknown): a renewal or a release was not confirmed by a majority.
/// - [`Refused`](ErrorKind::Refused), [`ModuleNotLoaded`](ErrorKind::ModuleNotLoaded): too many
///   servers answered this to leave a majority.
///
/// [`servers`](Self::servers) has every server's own [`Error`]: held by somebody else, with what is
/// left of that lease; not to be reached, with the source; too slow; refused. A grant whose reply
/// was lost is released in the background.
///
/// # Examples
///
/// ```no_run
/// # async fn example(client: rlock_client::QuorumClient) {
/// match client.lock("orders").try_lock().await {
///     Ok(_guard) => println!("ours"),
///     Err(error) if error.is_not_acquired() => println!("somebody else's"),
///     Err(error) => {
///         for (server, error) in error.servers() {
///             match error {
///                 None => println!("{server}: granted"),
///                 Some(error) => println!("{server}: {error}"),
///             }
///         }
///     }
/// }
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct QuorumError {
    pub(crate) kind: ErrorKind,
    pub(crate) what: String,
    pub(crate) servers: Vec<(String, Option<Error>)>,
}

impl QuorumError {
    /// One that has nothing to say of each server.
    pub(crate) fn new(kind: ErrorKind, what: String) -> Self {
        Self {
            kind,
            what,
            servers: Vec::new(),
        }
    }

    kinds! {
        /// Whether enough servers answered and somebody else has the lock, or tried to get it at
        /// the same moment.
        is_not_acquired: NotAcquired;

        /// Whether the lock had been lost: fewer than a majority of the servers still held it.
        is_lost: Lost;

        /// Whether too few servers could be asked, or answered in time. Trying again is safe.
        is_unavailable: Unavailable;
    }

    /// Every server's address and its error, `None` if it did its part. In the order in which the
    /// servers were named.
    pub fn servers(&self) -> impl Iterator<Item = (&str, Option<&Error>)> {
        let servers = self.servers.iter();
        servers.map(|(address, error)| (&**address, error.as_ref()))
    }
}

impl fmt::Display for QuorumError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            ErrorKind::Unknown => "no reply from the servers".to_owned(),
            kind => kind.to_string(),
        };
        write!(f, "{kind}: {}", self.what)?;
        for (address, error) in self.servers() {
            if let Some(error) = error {
                write!(f, "; {address}: {error}")?;
            }
        }
        Ok(())
    }
}

/// Without a source: the text says it of [every server](Self::servers).
impl std::error::Error for QuorumError {}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn it_says_of_each_server_what_was_wrong() {
        let down = redis::RedisError::from(std::io::Error::other("the cable is out"));
        let servers = vec![
            ("a:1".to_owned(), None),
            (
                "b:2".to_owned(),
                Some(Error::not_acquired(Some(Duration::from_millis(1234)))),
            ),
            ("c:3".to_owned(), Some(Error::could_not_connect(down))),
        ];
        let what = "1 of 3 servers granted it, 2 are needed".to_owned();
        let error = QuorumError {
            servers,
            ..QuorumError::new(ErrorKind::NotAcquired, what)
        };
        assert_eq!(
            error.to_string(),
            "not acquired: 1 of 3 servers granted it, 2 are needed; \
             b:2: not acquired: 1234 ms are left of the present lease; \
             c:3: unavailable: no connection: the cable is out"
        );
        let said: Vec<_> = error.servers().collect();
        assert_eq!(said[0].0, "a:1");
        assert!(said[0].1.is_none());
        assert!(std::error::Error::source(&error).is_none());
    }
}
