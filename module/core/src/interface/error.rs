//! All refusals that a client can get, in one table.

use crate::values::circle::Circle;
use crate::values::limits::{
    CHAIN_MAX, GRACE_MS_MAX, HOLD_COUNT_MAX, INTEGER_MAX, KEYS_MAX, LOOKS_MAX, MATCH_LEN_MAX,
    OWNER_LEN_MAX, PERMITS_MAX, SESSION_LEN_MAX,
};
use crate::values::mode::Kind;
use crate::values::token::Token;
use crate::values::word::Word;
use std::fmt;
use std::rc::Rc;

/// The refusals: the variants of [`CommandError`], each with its values and its text.
macro_rules! refusals {
    ($(
        $(#[$doc:meta])*
        $name:ident
        $(($($value:ident: $type:ty),+))?
        $({ $($(#[$field_doc:meta])* $field:ident: $field_type:ty,)+ })?
        => $text:literal $(, $part:expr)*;
    )+) => {
        /// The reason for which a command was refused. It has changed nothing.
        ///
        /// `Display` gives the text for the client: a code word, then the argument and its bounds.
        #[derive(Clone, Debug, PartialEq, Eq)]
        #[non_exhaustive]
        pub enum CommandError {
            $(
                $(#[$doc])*
                $name $(($($type),+))? $({ $($(#[$field_doc])* $field: $field_type,)+ })?,
            )+
        }

        impl fmt::Display for CommandError {
            #[allow(unused_variables, reason = "not every text has all values")]
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self {
                    $(Self::$name $(($($value),+))? $({ $($field),+ })? => {
                        write!(f, $text $(, $part)*)
                    })+
                }
            }
        }
    };
}

refusals! {
    /// Too few or too many arguments; the server has a text of its own for this.
    WrongArity => "ERR wrong number of arguments";
    /// A word that is not an option of the command.
    UnknownOption(word: Word) => "ERR unknown option '{word}'";
    /// An option given twice.
    RepeatedOption(word: Word) => "ERR option '{word}' is given twice";
    /// An option without the value that must follow it.
    MissingValue(word: Word) => "ERR option '{word}' needs a value";
    /// A lease that is not an integer within the bounds.
    Lease => "ERR lease-ms must be an integer from 1 to {INTEGER_MAX}";
    /// A wait that is not an integer within the bounds.
    Wait => "ERR wait-ms must be an integer from 0 to {INTEGER_MAX}";
    /// A token that is not an integer within the bounds.
    Token => "ERR token must be an integer from 1 to {}", i64::MAX;
    /// COUNT that is not an integer within the bounds.
    ListCount => "ERR COUNT must be an integer from 1 to {INTEGER_MAX}";
    /// MATCH with too long a pattern.
    MatchLength => "ERR pattern must have at most {MATCH_LEN_MAX} bytes";
    /// An empty or too long owner.
    OwnerLength => "ERR owner must have 1 to {OWNER_LEN_MAX} bytes";
    /// An owner named like one of the lock's own fields.
    OwnerReserved => "ERR owner must not be 'fence' or 'mode', fields of the lock itself";
    /// READ or WRITE for an owner whose name ends like a writer's field.
    OwnerOfWriter =>
        "ERR owner must not end in ':write' with READ or WRITE, as a writer's field does";
    /// READ and WRITE in one command.
    ReadAndWrite => "ERR option 'WRITE' cannot be combined with 'READ'";
    /// PERMITS that is not an integer within the bounds.
    Permits => "ERR permits must be an integer from 1 to {PERMITS_MAX}";
    /// OF that is not an integer within the bounds.
    Limit => "ERR OF must be an integer from 1 to {PERMITS_MAX}";
    /// A limit to be set that is not an integer within the bounds.
    LimitToSet => "ERR limit must be an integer from 0 to {PERMITS_MAX}";
    /// PERMITS together with READ or WRITE.
    PermitsAndMode => "ERR option 'PERMITS' cannot be combined with 'READ' or 'WRITE'";
    /// OF without PERMITS.
    LimitWithoutPermits => "ERR option 'OF' needs 'PERMITS'";
    /// More permits than the limit, which is this number.
    PermitsOverLimit(limit: i64) => "ERR permits must not exceed their limit, which is {limit}";
    /// More permits given back than the owner holds, which is this number.
    PermitsNotHeld(held: i64) =>
        "ERR permits given back must not exceed those held, whose number is {held}";
    /// Permits for an owner that holds some already.
    Held => "HELD this owner holds permits of this key already, ONCE begins their lease anew";
    /// Permits without a limit: the caller named none, and none is set.
    NoLimit => "NOLIMIT no limit is set with RLOCK.LIMIT, and PERMITS names none with OF";
    /// A limit for a name whose limit key would belong to another node.
    LimitInOtherSlot =>
        "CROSSSLOT key cannot have a limit in a cluster, \
         its braces put the key of the limit in another slot: name the limit with OF";
    /// Permits while the key's slot moves to another node.
    LimitOnItsWay =>
        "TRYAGAIN the key's slot is on its way to another node, \
         and with it the limit of permits";
    /// READ on a name whose timeout keys would belong to another node.
    TimeoutsInOtherSlot =>
        "CROSSSLOT key cannot be locked with READ in a cluster, \
         its braces put the timeout keys of readers in another slot";
    /// READ or WRITE while the key's slot moves to another node.
    SlotOnItsWay =>
        "TRYAGAIN the key's slot is on its way to another node, \
         and with it the timeout keys of readers";
    /// A number of keys that is out of bounds, or fewer keys than this number.
    KeyCount => "ERR numkeys must be an integer from 1 to {KEYS_MAX}, and so many keys must follow";
    /// An empty or too long session.
    SessionLength => "ERR session must have 1 to {SESSION_LEN_MAX} bytes";
    /// A grace that is not an integer within the bounds.
    Grace => "ERR grace-ms must be an integer from 0 to {GRACE_MS_MAX}";
    /// EPOCH that is not an integer within the bounds.
    Epoch => "ERR EPOCH must be an integer from 0 to {INTEGER_MAX}";
    /// AFTER with a life or a number of an event that is not an integer within the bounds.
    After =>
        "ERR AFTER must be a life and the number of an event, \
         integers from 0 to {INTEGER_MAX}";
    /// BLOCK and QUEUE in one command.
    BlockAndQueue => "ERR option 'QUEUE' cannot be combined with 'BLOCK'";
    /// QUEUE without the session that would get the event.
    QueueWithoutSession => "ERR option 'QUEUE' needs 'SESSION'";
    /// WANTED without the session that would get the event.
    WantedWithoutSession => "ERR option 'WANTED' needs 'SESSION'";
    /// A session without a connection that listens to it.
    NoSession => "NOSESSION nobody listens to this session, RLOCK.EVENTS must be called first";
    /// A session that another ACL user began.
    SessionOfAnother => "NOPERM this session belongs to another ACL user, who began it";
    /// There are as many sessions as `rlock.max-sessions` allows.
    TooManySessions(limit: u32) => "SESSIONSFULL too many sessions, rlock.max-sessions is {limit}";
    /// A new session while the server refuses every command that needs memory.
    OutOfMemory => "OOM command not allowed when used memory > 'maxmemory'.";
    /// The connection with this client id listens to the session now; 0 if it has closed again.
    TakenOver(by: u64) => "TAKENOVER the connection that listens to this session now is {by}";
    /// EVENTS or BIND with a smaller EPOCH than this one, which a later connection has named.
    Stale(known: u64) => "STALE a later connection has named EPOCH {known} for this session";
    /// BIND from a caller that has no connection of its own, or within MULTI.
    CannotBind =>
        "ERR RLOCK.BIND needs a connection of its own, \
         so not here within MULTI or another call";
    /// BIND on a connection that is bound to another session.
    BoundToAnother => "ERR this connection is bound to another session already";
    /// BIND cannot close the former connection, since `CLIENT` is renamed.
    CannotClose =>
        "ERR RLOCK.BIND cannot close the connection that was bound before, \
         since this server's command CLIENT is renamed";
    /// EVENTS from a caller that has no connection of its own.
    NoSessionConnection =>
        "ERR RLOCK.EVENTS needs a connection to live by, so not here within another call";
    /// EVENTS with BLOCK on a connection that the server does not block.
    CannotBlock =>
        "ERR RLOCK.EVENTS cannot wait on a RESP3 connection with subscriptions, \
         which this server does not block: give it one of its own";
    /// A wait that could never end, with the owners that would wait for each other.
    Deadlock(circle: Circle) => "DEADLOCK {circle}";
    /// A wait behind too many owners that wait for others: the deadlock search cannot tell whether
    /// it could end.
    ChainTooLong =>
        "QUEUEFULL more than {CHAIN_MAX} owners, or {LOOKS_MAX} of their waits and holds, \
         would have to be looked at to rule out a deadlock";
    /// GUARD without a command.
    NoCall => "ERR CALL and the command to be run must follow";
    /// A command that GUARD does not run.
    NotGuarded(command: Word, why: NotGuarded) =>
        "ERR command '{command}' cannot be guarded, {}", why.text();
    /// GUARD by an owner that does not hold the lock, with the token of the present hold.
    NotHeld(token: Option<Token>) =>
        "NOTHELD this owner does not hold the lock, or not with this token{}", present(*token);
    /// A second wait of an owner for the same lock.
    Waiting => "WAITING this owner waits for the lock already, ONCE takes that wait over";
    /// The wait would close a circle through a lock that is about to change hands; or other modules
    /// change the lock each time while the command reads it.
    Unsettled => "TRYAGAIN the locks change while the command looks at them";
    /// The server became a replica, which has no waiters.
    Unblocked =>
        "UNBLOCKED force unblock from blocking operation, \
         instance state changed (master -> replica?)";
    /// A re-entry above the largest hold count.
    HoldCountOverflow => "ERR hold count must stay within 1 to {HOLD_COUNT_MAX}";
    /// The value of the owner's field is not a hold count.
    HoldCountMalformed =>
        "ERR hold count of this owner is not an integer from 1 to {HOLD_COUNT_MAX}, \
         it was written by somebody else";
    /// The queue is as long as `rlock.max-waiters-per-lock` allows.
    TooManyWaiters(limit: u32) =>
        "QUEUEFULL too many waiters, rlock.max-waiters-per-lock is {limit}";
    /// The key holds another type.
    WrongType => "WRONGTYPE Operation against a key holding the wrong kind of value";
    /// The key holds a hash that is no lock.
    Data =>
        "WRONGTYPE the key holds a hash of data, which is no lock: \
         it has no TTL, and a field that is no hold";
    /// A command for one kind of lock on a lock of another kind.
    WrongKind {
        /// The kind of the lock.
        held: Kind,
        /// The kind that the command is for.
        asked: Kind,
    } => "WRONGKIND the key holds {}, not {}", name_of(*held), name_beside(*asked, *held);
    /// The key's slot is served by another node of the cluster.
    Moved {
        /// The slot.
        slot: u16,
        /// The node as `host:port`, for a client without TLS.
        address: Rc<str>,
        /// The node as `host:port`, for a client with TLS.
        tls_address: Rc<str>,
    } => "MOVED {slot} {address}";
}

/// The end of the text of [`CommandError::NotHeld`].
fn present(token: Option<Token>) -> String {
    let text = |token: Token| format!(", the present one is {}", token.get());
    token.map_or_else(String::new, text)
}

fn name_of(kind: Kind) -> &'static str {
    match kind {
        Kind::Plain => "a plain lock",
        Kind::ReadWrite => "a read-write lock",
        Kind::Permits => "permits",
    }
}

/// The name of a kind in a text that has named another one before.
fn name_beside(kind: Kind, other: Kind) -> &'static str {
    match (kind, other) {
        (Kind::Plain, Kind::ReadWrite | Kind::Plain) => "a plain one",
        (Kind::ReadWrite, Kind::Plain | Kind::ReadWrite) => "a read-write one",
        _ => name_of(kind),
    }
}

impl std::error::Error for CommandError {}

impl CommandError {
    /// The text for a client with TLS: a redirect names another port for it.
    pub fn over_tls(&self) -> String {
        match self {
            Self::Moved {
                slot, tls_address, ..
            } => format!("MOVED {slot} {tls_address}"),
            other => other.to_string(),
        }
    }
}

/// The reason for which a command cannot be guarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotGuarded {
    /// The server knows no command of this name.
    Unknown,
    /// It is one of our commands.
    Own,
    /// It runs a script.
    Script,
    /// The server does not let scripts run it.
    NotFromScripts,
    /// It belongs to another module.
    OfModule,
    /// It is about the server, a connection or replicas, and not about keys.
    NotAboutKeys,
}

impl NotGuarded {
    fn text(self) -> &'static str {
        match self {
            Self::Unknown => "the server does not know it",
            Self::Own => "it is one of RLOCK itself",
            Self::Script => {
                "it runs a script, and servers stop if its client disconnects meanwhile"
            }
            Self::NotFromScripts => "the server does not let scripts run it",
            Self::OfModule => "it belongs to a module, and may block its client",
            Self::NotAboutKeys => {
                "only commands that read or write keys can be, \
                 and ECHO, PING, PUBLISH, SPUBLISH and TIME"
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::iter::successors;

    const DOCUMENT: &str = include_str!("../../../../docs/commands.md");

    /// The refusals one after the other, so that a new one without a place here does not compile.
    #[allow(clippy::too_many_lines, reason = "one table")]
    fn after(refusal: &CommandError) -> Option<CommandError> {
        let word = || Word::new(b"X");
        Some(match refusal {
            CommandError::WrongArity => CommandError::UnknownOption(word()),
            CommandError::UnknownOption(_) => CommandError::RepeatedOption(word()),
            CommandError::RepeatedOption(_) => CommandError::MissingValue(word()),
            CommandError::MissingValue(_) => CommandError::Lease,
            CommandError::Lease => CommandError::Wait,
            CommandError::Wait => CommandError::Token,
            CommandError::Token => CommandError::ListCount,
            CommandError::ListCount => CommandError::MatchLength,
            CommandError::MatchLength => CommandError::OwnerLength,
            CommandError::OwnerLength => CommandError::OwnerReserved,
            CommandError::OwnerReserved => CommandError::OwnerOfWriter,
            CommandError::OwnerOfWriter => CommandError::ReadAndWrite,
            CommandError::ReadAndWrite => CommandError::Permits,
            CommandError::Permits => CommandError::Limit,
            CommandError::Limit => CommandError::LimitToSet,
            CommandError::LimitToSet => CommandError::PermitsAndMode,
            CommandError::PermitsAndMode => CommandError::LimitWithoutPermits,
            CommandError::LimitWithoutPermits => CommandError::PermitsOverLimit(7),
            CommandError::PermitsOverLimit(_) => CommandError::PermitsNotHeld(7),
            CommandError::PermitsNotHeld(_) => CommandError::Held,
            CommandError::Held => CommandError::NoLimit,
            CommandError::NoLimit => CommandError::LimitInOtherSlot,
            CommandError::LimitInOtherSlot => CommandError::LimitOnItsWay,
            CommandError::LimitOnItsWay => CommandError::TimeoutsInOtherSlot,
            CommandError::TimeoutsInOtherSlot => CommandError::SlotOnItsWay,
            CommandError::SlotOnItsWay => CommandError::KeyCount,
            CommandError::KeyCount => CommandError::SessionLength,
            CommandError::SessionLength => CommandError::Grace,
            CommandError::Grace => CommandError::Epoch,
            CommandError::Epoch => CommandError::After,
            CommandError::After => CommandError::BlockAndQueue,
            CommandError::BlockAndQueue => CommandError::QueueWithoutSession,
            CommandError::QueueWithoutSession => CommandError::WantedWithoutSession,
            CommandError::WantedWithoutSession => CommandError::NoSession,
            CommandError::NoSession => CommandError::SessionOfAnother,
            CommandError::SessionOfAnother => CommandError::TooManySessions(7),
            CommandError::TooManySessions(_) => CommandError::OutOfMemory,
            CommandError::OutOfMemory => CommandError::TakenOver(7),
            CommandError::TakenOver(_) => CommandError::Stale(7),
            CommandError::Stale(_) => CommandError::CannotBind,
            CommandError::CannotBind => CommandError::BoundToAnother,
            CommandError::BoundToAnother => CommandError::CannotClose,
            CommandError::CannotClose => CommandError::NoSessionConnection,
            CommandError::NoSessionConnection => CommandError::CannotBlock,
            CommandError::CannotBlock => CommandError::Deadlock(Circle::of_reader(b"X", b"X")),
            CommandError::Deadlock(_) => CommandError::ChainTooLong,
            CommandError::ChainTooLong => CommandError::NoCall,
            CommandError::NoCall => CommandError::NotGuarded(word(), NotGuarded::Unknown),
            CommandError::NotGuarded(_, why) => {
                let next = match why {
                    NotGuarded::Unknown => NotGuarded::Own,
                    NotGuarded::Own => NotGuarded::Script,
                    NotGuarded::Script => NotGuarded::NotFromScripts,
                    NotGuarded::NotFromScripts => NotGuarded::OfModule,
                    NotGuarded::OfModule => NotGuarded::NotAboutKeys,
                    NotGuarded::NotAboutKeys => return Some(CommandError::NotHeld(None)),
                };
                CommandError::NotGuarded(word(), next)
            }
            CommandError::NotHeld(None) => CommandError::NotHeld(Token::new(7)),
            CommandError::NotHeld(Some(_)) => CommandError::Waiting,
            CommandError::Waiting => CommandError::Unsettled,
            CommandError::Unsettled => CommandError::Unblocked,
            CommandError::Unblocked => CommandError::HoldCountOverflow,
            CommandError::HoldCountOverflow => CommandError::HoldCountMalformed,
            CommandError::HoldCountMalformed => CommandError::TooManyWaiters(7),
            CommandError::TooManyWaiters(_) => CommandError::WrongType,
            CommandError::WrongType => CommandError::Data,
            CommandError::Data => wrong_kind(Kind::ReadWrite, Kind::Plain),
            CommandError::WrongKind { held, asked } => after_kinds(*held, *asked),
            CommandError::Moved { .. } => return None,
        })
    }

    fn after_kinds(held: Kind, asked: Kind) -> CommandError {
        match (held, asked) {
            (Kind::ReadWrite, Kind::Plain) => wrong_kind(Kind::Plain, Kind::ReadWrite),
            (Kind::Plain, Kind::ReadWrite) => wrong_kind(Kind::Permits, Kind::Plain),
            (Kind::Permits, Kind::Plain) => wrong_kind(Kind::Permits, Kind::ReadWrite),
            (Kind::Permits, Kind::ReadWrite) => wrong_kind(Kind::Plain, Kind::Permits),
            (Kind::Plain, Kind::Permits) => wrong_kind(Kind::ReadWrite, Kind::Permits),
            _ => CommandError::Moved {
                slot: 7,
                address: "host:port".into(),
                tls_address: "host:tls-port".into(),
            },
        }
    }

    fn wrong_kind(held: Kind, asked: Kind) -> CommandError {
        CommandError::WrongKind { held, asked }
    }

    #[test]
    fn every_refusal_is_in_the_document() {
        let refusals = successors(Some(CommandError::WrongArity), after);
        let errors = DOCUMENT.split("\n| `").skip(1);
        let errors: Vec<_> = errors.filter_map(|row| row.split('`').next()).collect();
        let mut count = 0;
        for refusal in refusals {
            let text = refusal.to_string();
            let text = text
                .replace(" is 7", " is N")
                .replace("EPOCH 7 ", "EPOCH N ")
                .replace(" 7 ", " slot ");
            // Of the circle, and of the server's own words, only the beginning is known here.
            let is_whole = !matches!(
                refusal,
                CommandError::Deadlock(_) | CommandError::WrongArity
            );
            let documents =
                |error: &&&str| **error == text || !is_whole && error.starts_with(&text);
            assert!(
                errors.iter().any(|error| documents(&error)),
                "not documented: {text}"
            );
            count += 1;
        }
        assert_eq!(count, 71, "all have been looked at");
    }
}
