//! Commands that are parsed and checked: code that has one of these need not check it again.
//!
//! Each has a `parse` that takes the arguments after the command's name.

use crate::interface::error::CommandError;
use crate::interface::event::Moment;
use crate::interface::options::{
    AFTER, Arguments, BLOCK, CALL, COUNT, COUNTED, EPOCH, GRACE, LEASE, MATCH, OF, ONCE, Options,
    PERMITS, QUEUE, READ, SESSION, TOKEN, WANTED, WRITE,
};
use crate::interface::parse::{self, owner};
use crate::interface::stored_permits::{Permits, PermitsRequest};
use crate::values::ids::SessionRef;
use crate::values::mode::Mode;
use crate::values::time::{Lease, Wait};
use crate::values::token::Token;
use std::collections::BTreeSet;

/// `RLOCK.ACQUIRE key owner lease-ms [READ | WRITE | PERMITS n [OF limit]]
/// [BLOCK wait-ms | QUEUE wait-ms] [SESSION session] [WANTED] [ONCE]`
#[derive(Clone, Copy, Debug)]
pub struct Acquire<'a> {
    /// The lock's name.
    pub key: &'a [u8],
    /// The owner that asks.
    pub owner: &'a [u8],
    /// The lease of the hold.
    pub lease: Lease,
    /// The mode in which the owner wants the lock.
    pub mode: Mode,
    /// With [`Mode::Permits`], how many permits.
    pub asked: Option<PermitsRequest>,
    /// Whether and how to wait if the lock is not free.
    pub wait_mode: WaitMode,
    /// The session that the hold will belong to.
    pub session: Option<SessionRef<'a>>,
    /// Tell the session once when the hold keeps another owner out.
    pub wanted: bool,
    /// Do not count a hold or a wait of this owner a second time.
    pub once: bool,
}

/// Whether and how to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitMode {
    /// Not at all.
    None,
    /// Blocked on the connection, for this long.
    Block(Wait),
    /// In the queue for the session, for this long.
    Queue(Wait),
}

impl<'a> Acquire<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// The first argument that is out of bounds, and the first word that is not an option.
    pub fn parse(args: impl Iterator<Item = &'a [u8]>) -> Result<Self, CommandError> {
        let mut args = Arguments::new(args);
        let (key, owner) = (args.next()?, owner(args.next()?)?);
        let lease = parse::lease(args.next()?)?;
        let options = args.options(&[
            COUNTED, READ, WRITE, PERMITS, OF, BLOCK, QUEUE, SESSION, WANTED, ONCE,
        ])?;
        Ok(Self {
            key,
            owner,
            lease,
            wait_mode: wait_mode(options)?,
            session: options.session,
            wanted: options.wanted()?,
            once: options.once.is_some(),
            mode: options.mode(owner)?,
            asked: options.asked()?,
        })
    }
}

/// BLOCK or QUEUE. A queued waiter needs a session that can be told.
fn wait_mode(options: &Options<'_>) -> Result<WaitMode, CommandError> {
    match (options.block, options.queue, options.session) {
        (None, None, _) => Ok(WaitMode::None),
        (Some(wait), None, _) => Ok(WaitMode::Block(wait)),
        (Some(_), Some(_), _) => Err(CommandError::BlockAndQueue),
        (None, Some(_), None) => Err(CommandError::QueueWithoutSession),
        (None, Some(wait), Some(_)) => Ok(WaitMode::Queue(wait)),
    }
}

/// `RLOCK.RELEASE key owner [READ | WRITE | PERMITS n] [TOKEN token] [LEASE lease-ms]`
#[derive(Clone, Copy, Debug)]
pub struct Release<'a> {
    /// The lock's name.
    pub key: &'a [u8],
    /// The owner that gives it back.
    pub owner: &'a [u8],
    /// The mode in which the owner holds it.
    pub mode: Mode,
    /// With [`Mode::Permits`], how many are given back; none is all of them.
    pub permits: Option<Permits>,
    /// Only a hold with this token.
    pub token: Option<Token>,
    /// If holds are left, begin the lease anew.
    pub lease: Option<Lease>,
    /// The client that gives it back; none if no session needs to know. It is not among the
    /// arguments.
    pub by: Option<u64>,
}

impl<'a> Release<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// The first argument that is out of bounds, and the first word that is not an option.
    pub fn parse(args: impl Iterator<Item = &'a [u8]>) -> Result<Self, CommandError> {
        let mut args = Arguments::new(args);
        let (key, owner) = (args.next()?, owner(args.next()?)?);
        let options = args.options(&[COUNTED, READ, WRITE, PERMITS, TOKEN, LEASE])?;
        Ok(Self {
            key,
            owner,
            mode: options.mode(owner)?,
            permits: options.permits,
            token: options.token,
            lease: options.lease,
            by: None,
        })
    }
}

/// `RLOCK.RENEW key owner lease-ms [READ | WRITE | PERMITS] [TOKEN token] [SESSION session]
/// [WANTED]`
#[derive(Clone, Copy, Debug)]
pub struct Renew<'a> {
    /// The lock's name.
    pub key: &'a [u8],
    /// The owner that holds it.
    pub owner: &'a [u8],
    /// The new lease, from now on.
    pub lease: Lease,
    /// The mode in which the owner holds it.
    pub mode: Mode,
    /// Only a hold with this token.
    pub token: Option<Token>,
    /// The session that the hold will belong to from now on.
    pub session: Option<SessionRef<'a>>,
    /// Tell the session once when the hold keeps another owner out.
    pub wanted: bool,
}

impl<'a> Renew<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// The first argument that is out of bounds, and the first word that is not an option.
    pub fn parse(args: impl Iterator<Item = &'a [u8]>) -> Result<Self, CommandError> {
        let mut args = Arguments::new(args);
        let (key, owner) = (args.next()?, owner(args.next()?)?);
        let lease = parse::lease(args.next()?)?;
        let options = args.options(&[READ, WRITE, PERMITS, TOKEN, SESSION, WANTED])?;
        Ok(Self {
            key,
            owner,
            lease,
            token: options.token,
            session: options.session,
            wanted: options.wanted()?,
            mode: options.mode(owner)?,
        })
    }
}

/// `RLOCK.GUARD key owner [READ | WRITE | PERMITS] [TOKEN token] CALL command [arg ...]`
#[derive(Clone, Copy, Debug)]
pub struct Guard<'a> {
    /// The lock's name.
    pub key: &'a [u8],
    /// The owner that must hold it.
    pub owner: &'a [u8],
    /// The mode in which the owner must hold it.
    pub mode: Mode,
    /// Only with a hold that has this token.
    pub token: Option<Token>,
    /// The name of the command to run.
    pub command: &'a [u8],
    /// The index of that name among the words of this command, whose own name has index 0.
    pub place: usize,
}

impl<'a> Guard<'a> {
    /// Reads the arguments up to the name of the command to run. The rest are arguments of that
    /// command.
    ///
    /// # Errors
    /// The first argument that is out of bounds, the first word that is not an option, or a missing
    /// command.
    pub fn parse(args: impl Iterator<Item = &'a [u8]>) -> Result<Self, CommandError> {
        let mut args = Arguments::new(args);
        let (key, owner) = (args.next()?, owner(args.next()?)?);
        let options = args.options(&[READ, WRITE, PERMITS, TOKEN, CALL])?;
        let (mode, token) = (options.mode(owner), options.token);
        let command = args.option().ok_or(CommandError::NoCall)?;
        Ok(Self {
            key,
            owner,
            mode: mode?,
            token,
            command,
            place: args.place,
        })
    }
}

/// One of several keys. A key that was named more than once is there once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamedKey<'a> {
    /// Its index among the words of the command, whose name has index 0.
    pub place: usize,
    /// The lock's name.
    pub name: &'a [u8],
}

/// `RLOCK.MACQUIRE owner lease-ms numkeys key [key ...] [BLOCK wait-ms | QUEUE wait-ms]
/// [SESSION session] [WANTED] [ONCE]`
#[derive(Clone, Debug)]
pub struct MultiAcquire<'a> {
    /// The owner that asks.
    pub owner: &'a [u8],
    /// The lease of the holds.
    pub lease: Lease,
    /// The locks, in the order in which they were named.
    pub keys: Vec<NamedKey<'a>>,
    /// Whether and how to wait if not all locks are free.
    pub wait_mode: WaitMode,
    /// The session that the holds will belong to.
    pub session: Option<SessionRef<'a>>,
    /// Tell the session once for each hold that keeps another owner out.
    pub wanted: bool,
    /// Do not count a hold or a wait of this owner a second time.
    pub once: bool,
}

impl<'a> MultiAcquire<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// The first argument that is out of bounds, and the first word that is not an option.
    pub fn parse(args: impl Iterator<Item = &'a [u8]>) -> Result<Self, CommandError> {
        let mut args = Arguments::new(args);
        let owner = owner(args.next()?)?;
        let lease = parse::lease(args.next()?)?;
        let keys = keys(&mut args)?;
        let options = args.options(&[BLOCK, QUEUE, SESSION, WANTED, ONCE])?;
        Ok(Self {
            owner,
            lease,
            keys,
            wait_mode: wait_mode(options)?,
            session: options.session,
            wanted: options.wanted()?,
            once: options.once.is_some(),
        })
    }
}

/// `RLOCK.MRELEASE owner numkeys key [key ...]`
#[derive(Clone, Debug)]
pub struct MultiRelease<'a> {
    /// The owner that gives them back.
    pub owner: &'a [u8],
    /// The locks, in the order in which they were named.
    pub keys: Vec<NamedKey<'a>>,
    /// As in [`Release::by`].
    pub by: Option<u64>,
}

impl<'a> MultiRelease<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// The first argument that is out of bounds, or a wrong number of arguments.
    pub fn parse(args: impl Iterator<Item = &'a [u8]>) -> Result<Self, CommandError> {
        let mut args = Arguments::new(args);
        let owner = owner(args.next()?)?;
        let keys = keys(&mut args)?;
        args.no_option()?;
        let by = None;
        Ok(Self { owner, keys, by })
    }
}

/// `RLOCK.MRENEW owner lease-ms numkeys key [key ...] [SESSION session]`
#[derive(Clone, Debug)]
pub struct MultiRenew<'a> {
    /// The owner that holds them.
    pub owner: &'a [u8],
    /// The new lease, from now on.
    pub lease: Lease,
    /// The locks, in the order in which they were named.
    pub keys: Vec<NamedKey<'a>>,
    /// The session that the holds will belong to from now on.
    pub session: Option<SessionRef<'a>>,
}

impl<'a> MultiRenew<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// The first argument that is out of bounds, and the first word that is not an option.
    pub fn parse(args: impl Iterator<Item = &'a [u8]>) -> Result<Self, CommandError> {
        let mut args = Arguments::new(args);
        let owner = owner(args.next()?)?;
        let lease = parse::lease(args.next()?)?;
        let keys = keys(&mut args)?;
        let options = args.options(&[SESSION])?;
        Ok(Self {
            owner,
            lease,
            keys,
            session: options.session,
        })
    }
}

/// Which words of a command are keys: the argument at index `place` says how many follow it. None
/// if fewer follow. The command's name has index 0 and is not among `args`.
pub fn key_places<'a>(
    args: impl Iterator<Item = &'a [u8]>,
    place: usize,
) -> Option<impl Iterator<Item = usize>> {
    let mut args = args.skip(place.checked_sub(1)?);
    let count = parse::key_count(args.next()?).ok()?;
    let first = place.checked_add(1)?;
    (args.take(count).count() == count).then(|| (first..).take(count))
}

/// Parses numkeys and the keys. Each key is returned once.
fn keys<'a, I: Iterator<Item = &'a [u8]>>(
    args: &mut Arguments<'a, I>,
) -> Result<Vec<NamedKey<'a>>, CommandError> {
    let count = parse::key_count(args.next()?)?;
    let mut seen = BTreeSet::new();
    let mut keys = Vec::with_capacity(count);
    for _ in 0..count {
        let name = args.option().ok_or(CommandError::KeyCount)?;
        if seen.insert(name) {
            let place = args.place;
            keys.push(NamedKey { place, name });
        }
    }
    Ok(keys)
}

/// `RLOCK.CANCEL key owner [READ | WRITE | PERMITS]`
#[derive(Clone, Copy, Debug)]
pub struct Cancel<'a> {
    /// The lock's name.
    pub key: &'a [u8],
    /// The owner whose waiter leaves the queue.
    pub owner: &'a [u8],
    /// Only a waiter in this mode; none is in any.
    pub mode: Option<Mode>,
}

impl<'a> Cancel<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// An owner out of bounds, and the first word that is not an option.
    pub fn parse(args: impl Iterator<Item = &'a [u8]>) -> Result<Self, CommandError> {
        let mut args = Arguments::new(args);
        let (key, owner) = (args.next()?, owner(args.next()?)?);
        let options = args.options(&[READ, WRITE, PERMITS])?;
        let mode = options.mode.map(|_| options.mode(owner)).transpose()?;
        Ok(Self { key, owner, mode })
    }
}

/// `RLOCK.LIMIT key limit`
#[derive(Clone, Copy, Debug)]
pub struct Limit<'a> {
    /// The key of the permits.
    pub key: &'a [u8],
    /// How many permits may be held from now on. None removes the limit: then the limit that each
    /// caller names counts.
    pub limit: Option<Permits>,
}

impl<'a> Limit<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// A limit out of bounds, or a wrong number of arguments.
    pub fn parse(args: impl Iterator<Item = &'a [u8]>) -> Result<Self, CommandError> {
        let mut args = Arguments::new(args);
        let (key, limit) = (args.next()?, parse::limit_or_none(args.next()?)?);
        args.finish()?;
        Ok(Self { key, limit })
    }
}

/// `RLOCK.BREAK key` and `RLOCK.INFO key`
#[derive(Clone, Copy, Debug)]
pub struct KeyOnly<'a> {
    /// The lock's name.
    pub key: &'a [u8],
}

impl<'a> KeyOnly<'a> {
    /// Reads the argument.
    ///
    /// # Errors
    /// A wrong number of arguments.
    pub fn parse(args: impl Iterator<Item = &'a [u8]>) -> Result<Self, CommandError> {
        let mut args = Arguments::new(args);
        let key = args.next()?;
        args.finish()?;
        Ok(Self { key })
    }
}

/// `RLOCK.LIST [MATCH pattern] [COUNT n]` and `RLOCK.SESSIONS [MATCH pattern] [COUNT n]`
#[derive(Clone, Copy, Debug)]
pub struct List<'a> {
    /// Only names that match this glob-style pattern.
    pub pattern: Option<&'a [u8]>,
    /// At most this many.
    pub count: Option<usize>,
}

impl<'a> List<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// The first argument that is out of bounds, and the first word that is not an option.
    pub fn parse(args: impl Iterator<Item = &'a [u8]>) -> Result<Self, CommandError> {
        let mut args = Arguments::new(args);
        let options = args.options(&[MATCH, COUNT])?;
        Ok(Self {
            pattern: options.pattern,
            count: options.count,
        })
    }
}

/// `RLOCK.LOG [MATCH pattern] [COUNT n] | RESET`
#[derive(Clone, Copy, Debug)]
pub enum Log<'a> {
    /// Return the entries.
    Entries(List<'a>),
    /// Forget the entries.
    Reset,
}

impl<'a> Log<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// The first argument that is out of bounds, and the first word that is not an option.
    pub fn parse(args: impl Iterator<Item = &'a [u8]>) -> Result<Self, CommandError> {
        let mut args = args.peekable();
        let first = args.peek();
        if !first.is_some_and(|word| word.eq_ignore_ascii_case(b"RESET")) {
            return List::parse(args).map(Self::Entries);
        }
        Arguments::new(args.skip(1)).no_option()?;
        Ok(Self::Reset)
    }
}

/// `RLOCK.EVENTS session [EPOCH n] [AFTER life seq] [BLOCK wait-ms] [GRACE grace-ms]`
#[derive(Clone, Copy, Debug)]
pub struct Events<'a> {
    /// The session.
    pub session: SessionRef<'a>,
    /// The client's number of this session connection.
    pub epoch: Option<u64>,
    /// The last event that the client has heard; none acknowledges all that were told.
    pub after: Option<Moment>,
    /// How long to wait for the next event if no event is there; `None` is not at all.
    pub block: Option<Wait>,
    /// How long the session's holds outlive its connection, in milliseconds.
    pub grace_ms: i64,
}

impl<'a> Events<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// The first argument that is out of bounds, and the first word that is not an option.
    pub fn parse(args: impl Iterator<Item = &'a [u8]>) -> Result<Self, CommandError> {
        let mut args = Arguments::new(args);
        let session = parse::session(args.next()?)?;
        let options = args.options(&[EPOCH, AFTER, BLOCK, GRACE])?;
        Ok(Self {
            session,
            epoch: options.epoch,
            after: options.after,
            block: options.block,
            grace_ms: options.grace_ms.unwrap_or(0),
        })
    }
}

/// `RLOCK.BIND session EPOCH n`
#[derive(Clone, Copy, Debug)]
pub struct Bind<'a> {
    /// The session.
    pub session: SessionRef<'a>,
    /// The client's number of this command connection.
    pub epoch: u64,
}

impl<'a> Bind<'a> {
    /// Reads the arguments.
    ///
    /// # Errors
    /// The first argument that is out of bounds, or a word that is not the option.
    pub fn parse(args: impl Iterator<Item = &'a [u8]>) -> Result<Self, CommandError> {
        let mut args = Arguments::new(args);
        let session = parse::session(args.next()?)?;
        let word = args.next()?;
        if !word.eq_ignore_ascii_case(b"EPOCH") {
            return Err(parse::unknown(word));
        }
        let epoch = parse::epoch(args.value(word)?)?;
        args.no_option()?;
        Ok(Self { session, epoch })
    }
}
