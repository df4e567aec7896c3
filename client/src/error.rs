//! The one error type: what the caller now knows, kept apart from what went wrong. And why a hold
//! is over.

use std::borrow::Cow;
use std::fmt;
use std::time::Duration;

use redis::RedisError;

/// Why a call failed.
///
/// The kind tells what is certain:
/// - [not acquired](Self::is_not_acquired): somebody else has the lock; nothing is held.
/// - [lost](Self::is_lost): this hold is over, and another owner may have the lock since.
/// - [unavailable](Self::is_unavailable): the server has not carried the command out.
/// - [unknown](Self::is_unknown): the command was sent and no reply came.
/// - [unexpected reply](Self::is_unexpected_reply): the command was carried out; its reply is of
///   another type than the one that the caller asked for.
/// - [deadlock](Self::is_deadlock): the wait could never have ended; nothing is held.
/// - [module not loaded](Self::is_module_not_loaded): the server does not know `RLOCK.*`.
/// - [refused](Self::is_refused): the server said no, in the words that the error shows.
/// - [not acknowledged](Self::is_not_acknowledged): the lock was granted, but too few replicas
///   acknowledged it in time; nothing is held. After a renewal: the hold stays as it was.
///
/// After an unknown `lock()`, `try_lock()` or `lock_timeout()` the client releases a possible grant
/// in the background. At worst the lock stays taken until its lease ends.
#[derive(Clone, Debug)]
pub struct Error {
    kind: ErrorKind,
    /// Decisions are made by this and the kind, never by the text.
    pub(crate) code: Code,
    detail: Cow<'static, str>,
    lease_left: Option<Duration>,
}

/// The kinds of [`Error`], for a `match`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// Somebody else has the lock.
    NotAcquired,
    /// The hold is over although nobody unlocked it.
    Lost,
    /// The server could not be asked, or is not ready to answer.
    Unavailable,
    /// The command was sent, but its reply did not come.
    Unknown,
    /// The wait would have closed a circle of owners that wait for each other.
    Deadlock,
    /// The server does not know the `RLOCK.*` commands.
    ModuleNotLoaded,
    /// The server refused the command, or would.
    Refused,
    /// Not enough replicas acknowledged it: a grant was given back, a renewal does not count.
    NotAcknowledged,
    /// The command was carried out, but its reply is not of the type that the caller asked for.
    UnexpectedReply,
}

/// The method `kind`, and for each listed kind a method that tests for it.
macro_rules! kinds {
    ($($(#[$doc:meta])* $is:ident: $kind:ident;)*) => {
        /// The kind of this error.
        pub fn kind(&self) -> crate::ErrorKind {
            self.kind
        }

        $(
            $(#[$doc])*
            pub fn $is(&self) -> bool {
                self.kind == crate::ErrorKind::$kind
            }
        )*
    };
}
pub(crate) use kinds;

impl Error {
    kinds! {
        /// Whether the server answered that somebody else has the lock. Then
        /// [`lease_left`](Self::lease_left) tells for how long at most, unless renewed.
        is_not_acquired: NotAcquired;

        /// Whether the lock had been lost: its lease ran out, or it was broken or deleted.
        is_lost: Lost;

        /// Whether the server did not carry the command out: it could not be reached, or it
        /// answered that it is loading, busy, a replica, without a leader, full of sessions or
        /// unable to write just now. Trying again is safe.
        is_unavailable: Unavailable;

        /// Whether the command was sent and its reply never came, so that the server may or may not
        /// have carried it out.
        is_unknown: Unknown;

        /// Whether the server refused a wait that could never have ended; the message names the
        /// circle.
        is_deadlock: Deadlock;

        /// Whether the server answered that it does not know the `RLOCK.*` commands.
        is_module_not_loaded: ModuleNotLoaded;

        /// Whether the server refused the command, such as for a lease of zero or a key that holds
        /// another type. The message is the server's. Several locks without a name are not asked
        /// for, nor is anything for an [`Owner`](crate::Owner) of another client, or with
        /// [settings](crate::ClientBuilder) that can never work: out of their bounds, a URL or a
        /// certificate that cannot be read, a feature of the crate that is missing.
        is_refused: Refused;

        /// Whether the lock was granted but not enough replicas, or disks, acknowledged that in
        /// time: see [`ClientBuilder::acknowledged_by`](crate::ClientBuilder::acknowledged_by). It
        /// is given back in the background. Or whether that is so of a
        /// [renewal](crate::Guard::renew): the guard then stays valid for as long as it was.
        is_not_acknowledged: NotAcknowledged;

        /// Whether a [guarded command](crate::Guard::call) was carried out, but its reply does not
        /// convert to the type that the caller asked for; a missing value, for example, is no
        /// `i64`. The message shows the reply. Calling again would carry the command out again.
        is_unexpected_reply: UnexpectedReply;
    }

    /// Whether no word came from the server: it was not asked, or did not answer.
    pub(crate) fn is_unanswered(&self) -> bool {
        self.is_unavailable() || self.is_unknown()
    }

    /// The time that was left of the present holder's lease when the server answered "not
    /// acquired".
    ///
    /// Zero: free at that instant, but promised to a waiter. `None`: the key has no expiry, or the
    /// server was not asked because another call of the same owner waits for the lock already, or
    /// this is an error of another kind.
    pub fn lease_left(&self) -> Option<Duration> {
        self.lease_left
    }

    pub(crate) fn new(kind: ErrorKind, detail: impl Into<Cow<'static, str>>) -> Self {
        Self {
            kind,
            code: Code::None,
            detail: detail.into(),
            lease_left: None,
        }
    }

    pub(crate) fn unavailable(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Unavailable, detail)
    }

    pub(crate) fn refused(detail: impl Into<Cow<'static, str>>) -> Self {
        Self::new(ErrorKind::Refused, detail)
    }

    /// The same because of this, which the text says as well.
    pub(crate) fn because(mut self, cause: impl Into<RedisError>) -> Self {
        self.detail = format!("{}: {}", self.detail, cause.into()).into();
        self
    }

    pub(crate) fn not_acquired(lease_left: Option<Duration>) -> Self {
        let detail = match lease_left {
            None => "it is held without an expiry".into(),
            Some(Duration::ZERO) => "it is promised to a waiter".into(),
            Some(left) => format!("{} ms are left of the present lease", left.as_millis()),
        };
        Self {
            lease_left,
            ..Self::new(ErrorKind::NotAcquired, detail)
        }
    }

    pub(crate) fn lost(reason: LostReason) -> Self {
        Self::new(ErrorKind::Lost, reason.to_string())
    }

    pub(crate) fn shut_down() -> Self {
        Self::unavailable("the client has been shut down")
    }

    /// A question that changes nothing was not answered, so nothing is unknown; and why a server is
    /// not asked whose connection is known to be broken.
    pub(crate) fn not_attached() -> Self {
        Self::unavailable("its connection is broken")
    }

    /// The server of the commands does not know the session that another has begun.
    pub(crate) fn two_servers() -> Self {
        let detail = "its address seems to lead to one server for events, to another for commands";
        Self::unavailable(detail)
    }

    /// One of several servers did not answer within the time that it is given.
    pub(crate) fn too_slow(limit: Duration) -> Self {
        let detail = format!("too slow, no answer within {} ms", limit.as_millis());
        Self::new(ErrorKind::Unknown, detail)
    }

    /// No connection, or one that the server refused with an error of its own, for example for a
    /// wrong password.
    pub(crate) fn could_not_connect(cause: RedisError) -> Self {
        match cause.code() {
            Some(code) => Self::from_server(code, cause.detail()),
            None => Self::unavailable("no connection").because(cause),
        }
    }

    /// The same error; the command waits for a session that is not there yet, if that may come.
    pub(crate) fn without_session(mut self) -> Self {
        if !self.is_final() {
            self.code = Code::NoSession;
        }
        self
    }

    /// Not sent: the session is attached to another server than the commands go to just now.
    pub(crate) fn elsewhere() -> Self {
        Self {
            code: Code::Elsewhere,
            ..Self::unavailable("the session is attached to another server")
        }
    }

    /// No sentinel named the primary; `errors` has the reason of each, at least one. Asking again
    /// is of no use only if all of them refused.
    pub(crate) fn no_sentinel(errors: &[Self]) -> Self {
        let other = errors.iter().find(|error| !error.is_refused());
        let kind = other.map_or(ErrorKind::Refused, |_| ErrorKind::Unavailable);
        let each: Vec<_> = errors.iter().map(|error| &*error.detail).collect();
        Self::new(kind, each.join("; "))
    }

    /// The same, said by one of several.
    pub(crate) fn of(self, whom: &str) -> Self {
        let detail = format!("{whom}: {}", self.detail).into();
        Self { detail, ..self }
    }

    /// Too few acknowledged a grant or a renewal, because a server could not be asked or did not
    /// answer.
    pub(crate) fn unacknowledged(self) -> Self {
        if !self.is_unanswered() {
            return self;
        }
        Self::new(ErrorKind::NotAcknowledged, self.to_string())
    }

    /// An error reply to WAIT or WAITAOF, which older servers do not know.
    pub(crate) fn of_wait(mut self) -> Self {
        if !self.is_unanswered() {
            self.kind = ErrorKind::Refused;
        }
        self
    }

    /// Whether nothing will change by asking again: the server said no, or knows no `RLOCK.*`. That
    /// it has no memory passes.
    pub(crate) fn is_final(&self) -> bool {
        let refused = self.is_refused() || self.is_module_not_loaded();
        refused && self.code != Code::OutOfMemory
    }

    pub(crate) fn no_reply() -> Self {
        let detail = "it may or may not have been carried out";
        Self::new(ErrorKind::Unknown, detail)
    }

    /// The reply of a command that was carried out is not of the type that the caller asked for.
    pub(crate) fn unexpected_reply(cause: impl Into<RedisError>) -> Self {
        let detail = "the command was carried out";
        Self::new(ErrorKind::UnexpectedReply, detail).because(cause)
    }

    /// An error reply of the server, by its code word.
    pub(crate) fn from_server(code: &str, details: Option<&str>) -> Self {
        Self::from_text(&format!("{code} {}", details.unwrap_or_default()))
    }

    /// The text of an error of the server, with its code word in front.
    pub(crate) fn from_text(text: &str) -> Self {
        use ErrorKind::{Deadlock, Lost, ModuleNotLoaded, Refused, Unavailable};
        let (word, details) = text.split_once(' ').unwrap_or((text, ""));
        // Any other code means that the server refuses the command. After `Unavailable` it has not
        // carried the command out, and may do so later.
        let (code, kind) = match word {
            "DEADLOCK" => (Code::None, Deadlock),
            "NOTHELD" => (Code::NotHeld, Lost),
            "MOVED" => (Code::Moved, Refused),
            "ASK" => (Code::Ask, Refused),
            "OOM" => (Code::OutOfMemory, Refused),
            "READONLY" => (Code::ReadOnly, Unavailable),
            "NOSESSION" => (Code::NoSession, Unavailable),
            "STALE" => (Code::Stale, Unavailable),
            "TRYAGAIN" => (Code::TryAgain, Unavailable),
            "CLUSTERDOWN" => (Code::ClusterDown, Unavailable),
            "TAKENOVER" | "SESSIONSFULL" | "LOADING" | "BUSY" | "MASTERDOWN" | "UNBLOCKED"
            | "NOREPLICAS" | "MISCONF" => (Code::None, Unavailable),
            // The server has no code words of its own for these two.
            "ERR" if details.starts_with("unknown command") => (Code::None, ModuleNotLoaded),
            "ERR" if details.starts_with("max number of clients") => (Code::None, Unavailable),
            _ => (Code::None, Refused),
        };
        Self {
            code,
            ..Self::new(kind, text.to_owned())
        }
    }

    /// Where the server sends the command, if it did, by `MOVED slot host:port` or `ASK slot
    /// host:port`: the host, and none for the one that was asked; and the port. The command has not
    /// been carried out.
    pub(crate) fn redirect(&self) -> Option<(Option<&str>, u16)> {
        let text = matches!(self.code, Code::Moved | Code::Ask).then_some(&self.detail)?;
        let (host, port) = text.split(' ').nth(2)?.rsplit_once(':')?;
        let host = Some(host).filter(|host| !host.is_empty());
        Some((host, port.parse().ok()?))
    }

    /// Turns an error that redirects a command into one for its caller: no node has carried the
    /// command out.
    pub(crate) fn misdirected(mut self) -> Self {
        if self.redirect().is_some() {
            self.kind = ErrorKind::Unavailable;
        }
        self
    }

    pub(crate) fn no_cluster() -> Self {
        Self::unavailable("a cluster needs the URL of one of its nodes")
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.kind, self.detail)
    }
}

impl fmt::Display for ErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotAcquired => "not acquired",
            Self::Lost => "the lock was lost",
            Self::Unavailable => "unavailable",
            Self::Unknown => "no reply from the server",
            Self::Deadlock => "the wait could never end",
            Self::ModuleNotLoaded => "the module is not loaded",
            Self::Refused => "refused",
            Self::NotAcknowledged => "not acknowledged",
            Self::UnexpectedReply => "unexpected reply",
        })
    }
}

/// Without a source: the text says what an error came from, and whoever prints the chain of sources
/// would read it twice.
impl std::error::Error for Error {}

/// Why a hold is over although nobody unlocked it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum LostReason {
    /// The lease has run out, or may have: it was not renewed, or no renewal was confirmed in
    /// time.
    Expired,
    /// The server renewed the lease, but too few replicas, or disks, acknowledged that in time: the
    /// last lease that [enough of them](crate::ClientBuilder::acknowledged_by) know of has run out,
    /// or may have.
    NotAcknowledged,
    /// An operator ended it, with `RLOCK.BREAK`.
    Broken,
    /// The lock's key was deleted, evicted or flushed.
    Deleted,
    /// Another client has named this owner, and its own session: the hold belongs to it now.
    Taken,
    /// The server says that this owner does not hold the lock with this token, and not why.
    NotHeld,
    /// The session was not confirmed for the [grace](crate::ClientBuilder::grace): the server may
    /// have taken this client for dead.
    SessionUnconfirmed,
    /// It was held for as long as [`max_hold`](crate::ClientBuilder::max_hold) allows.
    MaxHold,
}

impl LostReason {
    /// The word in the server's event.
    pub(crate) fn from_server(word: &[u8]) -> Self {
        match word {
            b"expired" => Self::Expired,
            b"broken" => Self::Broken,
            b"deleted" => Self::Deleted,
            b"taken" => Self::Taken,
            _ => Self::NotHeld,
        }
    }
}

impl fmt::Display for LostReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Expired => "no renewal was confirmed within its lease",
            Self::NotAcknowledged => "no renewal was acknowledged within its lease",
            Self::Broken => "an operator broke it",
            Self::Deleted => "its key was deleted",
            Self::Taken => "another client's session took it over",
            Self::NotHeld => "the server says that it is no longer held",
            Self::SessionUnconfirmed => "the session was not confirmed within the grace",
            Self::MaxHold => "it was held for as long as is allowed",
        })
    }
}

/// The code of a server's error or of our own, by which the crate makes its decisions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    /// No code that matters.
    None,
    /// The lock's slot is at another node, or its key is for now.
    Moved,
    Ask,
    /// The slot is on its way: the command may be carried out soon.
    TryAgain,
    /// The cluster has lost a node: the same.
    ClusterDown,
    /// The server is a replica.
    ReadOnly,
    /// The server does not know the session, or not on this connection.
    NoSession,
    /// A newer connection of the session is there.
    Stale,
    /// The session is attached to another server than the command would go to: it was not sent.
    Elsewhere,
    NotHeld,
    OutOfMemory,
}

impl Code {
    /// Whether the command has reached a server that does not serve its lock, or not yet.
    pub(crate) fn is_misdirection(self) -> bool {
        matches!(
            self,
            Self::ReadOnly | Self::Moved | Self::Ask | Self::TryAgain | Self::ClusterDown
        )
    }

    /// Whether the session is not known to the server yet, or not in this life.
    pub(crate) fn is_early(self) -> bool {
        matches!(self, Self::NoSession | Self::Stale)
    }

    /// Whether the session is not there, or not where the command would go.
    pub(crate) fn is_without_session(self) -> bool {
        matches!(self, Self::NoSession | Self::Elsewhere)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(code: &str, detail: &str) -> Error {
        let error = redis::make_extension_error(code.into(), Some(detail.into()));
        let value = redis::ServerError::try_from(error).expect("a server's error");
        Error::from_server(value.code(), value.details())
    }

    #[test]
    fn a_redirect_names_a_node_or_a_port_of_the_same_host() {
        for (text, redirect) in [
            ("MOVED 3999 127.0.0.1:6381", (Some("127.0.0.1"), 6_381)),
            ("ASK 0 ::1:6381", (Some("::1"), 6_381)),
            ("MOVED 0 :6381", (None, 6_381)),
            ("MOVED 0 ?:6381", (Some("?"), 6_381)),
        ] {
            assert_eq!(Error::from_text(text).redirect(), Some(redirect), "{text}");
        }
        for text in ["MOVED", "MOVED 1", "ASK 1 a", "ASK 1 a:x", "ERR 1 a:1"] {
            assert_eq!(Error::from_text(text).redirect(), None, "{text}");
        }
    }

    #[test]
    fn code_words_become_kinds_and_the_text_is_kept() {
        let cases = [
            ("DEADLOCK", "a waits for b", ErrorKind::Deadlock),
            (
                "ERR",
                "unknown command 'RLOCK.ACQUIRE'",
                ErrorKind::ModuleNotLoaded,
            ),
            ("ERR", "lease-ms must be positive", ErrorKind::Refused),
            ("WRONGTYPE", "not a lock", ErrorKind::Refused),
            ("READONLY", "a replica", ErrorKind::Unavailable),
            (
                "ERR",
                "max number of clients reached",
                ErrorKind::Unavailable,
            ),
            ("LOADING", "the dataset", ErrorKind::Unavailable),
            ("NOSESSION", "nobody listens", ErrorKind::Unavailable),
            ("SESSIONSFULL", "too many", ErrorKind::Unavailable),
            ("UNBLOCKED", "master -> replica", ErrorKind::Unavailable),
        ];
        for (code, detail, kind) in cases {
            let error = reply(code, detail);
            assert_eq!(error.kind(), kind, "{code}");
            assert!(
                error.to_string().ends_with(&format!("{code} {detail}")),
                "{error}"
            );
        }
    }

    /// The kind that a caller finally gets for an error with this text.
    fn told(text: &str) -> ErrorKind {
        Error::from_text(text).misdirected().kind()
    }

    #[test]
    fn errors_of_the_server_are_of_the_kinds_that_are_documented() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/commands.md");
        let document = std::fs::read_to_string(path).expect("the document");
        let (_, errors) = document.split_once("\n# Errors\n").expect("the errors");
        let (errors, _) = errors.split_once("\n# ").expect("their end");
        let mut codes = Vec::new();
        for row in errors.lines().filter(|line| line.starts_with("| `")) {
            let [_, texts, _, kind, ..] = row.split('|').collect::<Vec<_>>()[..] else {
                panic!("not a row: {row}")
            };
            for text in texts.split('`').skip(1).step_by(2) {
                let said = format!("{:?}", told(&text.replace("slot host:port", "7 h:1")));
                assert_eq!(said, kind.trim().trim_matches('`'), "{text}");
                codes.push(text.split(' ').next().unwrap_or_default());
            }
        }
        for code in [
            "READONLY",
            "NOSESSION",
            "TAKENOVER",
            "STALE",
            "SESSIONSFULL",
            "LOADING",
            "BUSY",
            "MASTERDOWN",
            "CLUSTERDOWN",
            "TRYAGAIN",
            "UNBLOCKED",
            "NOREPLICAS",
            "MISCONF",
        ] {
            assert_eq!(told(code), ErrorKind::Unavailable, "{code}");
            assert!(codes.contains(&code), "{code} is not documented");
        }
    }

    #[test]
    fn not_acquired_tells_what_is_left_of_the_lease() {
        let error = Error::not_acquired(Some(Duration::from_millis(1234)));
        assert!(error.is_not_acquired());
        assert_eq!(error.lease_left(), Some(Duration::from_millis(1234)));
        assert_eq!(
            error.to_string(),
            "not acquired: 1234 ms are left of the present lease"
        );
        assert_eq!(Error::not_acquired(None).lease_left(), None);
    }

    #[test]
    fn the_text_says_the_cause_once() {
        let cable = RedisError::from(std::io::Error::other("the cable is out"));
        let error = Error::could_not_connect(cable);
        assert!(std::error::Error::source(&error).is_none());
        let text = "unavailable: no connection: the cable is out";
        assert_eq!(
            error.clone().of("a:1").to_string(),
            text.replace("no", "a:1: no")
        );
        assert_eq!(error.to_string(), text);
        let wrong = redis::make_extension_error("WRONGPASS".into(), Some("no".into()));
        let error = Error::could_not_connect(wrong);
        assert_eq!(error.to_string(), "refused: WRONGPASS no");
    }

    #[test]
    fn why_nothing_was_asked_is_what_broke_the_connection_and_never_unknown() {
        let text = |error: Error| error.to_string();
        let reset = std::io::Error::new(std::io::ErrorKind::ConnectionReset, "gone");
        let reset = RedisError::from(reset);
        let broken = "unavailable: its connection is broken: gone";
        assert_eq!(text(Error::not_attached().because(reset)), broken);
        let loading = text(reply("LOADING", "the dataset"));
        assert_eq!(loading, "unavailable: LOADING the dataset");
        let memory = text(reply("OOM", "no"));
        assert_eq!(memory, "refused: OOM no");
        assert!(!reply("OOM", "no").is_final(), "it passes");
        let refused = text(reply("WRONGPASS", "no"));
        assert_eq!(refused, "refused: WRONGPASS no");
    }
}
