//! Commands that are parsed and checked: code that has one of these need not check it again.
//!
//! Each has a `parse` that takes the arguments after the command's name.

use crate::interface::error::CommandError;
use crate::interface::event::Moment;
use crate::interface::parse::{self, Arguments, Once, owner};
use crate::interface::stored_permits::{Permits, PermitsRequest};
use crate::values::ids::SessionRef;
use crate::values::mode::Mode;
use crate::values::names::WRITER_SUFFIX;
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
        let (mut mode, mut permits, mut limit) = (ModeOption::new(), Once::new(), Once::new());
        let options = AcquireOptions::parse(args, |word, args| {
            if word.eq_ignore_ascii_case(b"PERMITS") {
                let value = args.value(word)?;
                mode.add(Mode::Permits, word)?;
                permits.set(word, parse::permits(value))?;
            } else if word.eq_ignore_ascii_case(b"OF") {
                limit.set(word, parse::limit(args.value(word)?))?;
            } else {
                return mode.set(word);
            }
            Ok(true)
        })?;
        let mode = mode.get(owner)?;
        let asked = asked(permits.get(), limit.get())?;
        let AcquireOptions {
            wait_mode,
            session,
            wanted,
            once,
        } = options;
        Ok(Self {
            key,
            owner,
            lease,
            mode,
            asked,
            wait_mode,
            session,
            wanted,
            once,
        })
    }
}

/// PERMITS and OF. A request cannot be larger than the limit that it names.
fn asked(
    permits: Option<Permits>,
    limit: Option<Permits>,
) -> Result<Option<PermitsRequest>, CommandError> {
    let Some(permits) = permits else {
        return limit.map_or(Ok(None), |_| Err(CommandError::LimitWithoutPermits));
    };
    match limit {
        Some(limit) if permits > limit => Err(CommandError::PermitsOverLimit(limit.get())),
        _ => Ok(Some(PermitsRequest { permits, limit })),
    }
}

/// READ, WRITE or PERMITS: only one of them, and only once.
struct ModeOption(Option<Mode>);

impl ModeOption {
    fn new() -> Self {
        Self(None)
    }

    /// Stores the mode if the word names one. Otherwise returns false.
    fn set(&mut self, word: &[u8]) -> Result<bool, CommandError> {
        let mode = if word.eq_ignore_ascii_case(b"READ") {
            Mode::Read
        } else if word.eq_ignore_ascii_case(b"WRITE") {
            Mode::Write
        } else {
            return Ok(false);
        };
        self.add(mode, word).map(|()| true)
    }

    /// The same for commands in which PERMITS names only the kind, without a number.
    fn set_without_number(&mut self, word: &[u8]) -> Result<bool, CommandError> {
        if word.eq_ignore_ascii_case(b"PERMITS") {
            return self.add(Mode::Permits, word).map(|()| true);
        }
        self.set(word)
    }

    fn add(&mut self, mode: Mode, word: &[u8]) -> Result<(), CommandError> {
        match self.0.replace(mode) {
            None => Ok(()),
            Some(before) if before == mode => Err(parse::repeated(word)),
            Some(before) if before == Mode::Permits || mode == Mode::Permits => {
                Err(CommandError::PermitsAndMode)
            }
            Some(_) => Err(CommandError::ReadAndWrite),
        }
    }

    /// The mode, if this owner can hold a lock in it.
    fn get(self, owner: &[u8]) -> Result<Mode, CommandError> {
        match self.0 {
            None => Ok(Mode::Plain),
            Some(Mode::Read | Mode::Write) if owner.ends_with(WRITER_SUFFIX) => {
                Err(CommandError::OwnerOfWriter)
            }
            Some(mode) => Ok(mode),
        }
    }
}

/// The options of ACQUIRE and MACQUIRE.
struct AcquireOptions<'a> {
    wait_mode: WaitMode,
    session: Option<SessionRef<'a>>,
    wanted: bool,
    once: bool,
}

impl<'a> AcquireOptions<'a> {
    /// `other` handles a word that is none of these options. It returns false if the word is not an
    /// option at all.
    fn parse<I: Iterator<Item = &'a [u8]>>(
        mut args: Arguments<I>,
        mut other: impl FnMut(&'a [u8], &mut Arguments<I>) -> Result<bool, CommandError>,
    ) -> Result<Self, CommandError> {
        let (mut block, mut queue) = (Once::new(), Once::new());
        let (mut session, mut wanted, mut once) = (Once::new(), Once::new(), Once::new());
        while let Some(word) = args.option() {
            if word.eq_ignore_ascii_case(b"BLOCK") {
                block.set(word, parse::wait(args.value(word)?))?;
            } else if word.eq_ignore_ascii_case(b"QUEUE") {
                queue.set(word, parse::wait(args.value(word)?))?;
            } else if word.eq_ignore_ascii_case(b"SESSION") {
                session.set(word, parse::session(args.value(word)?))?;
            } else if word.eq_ignore_ascii_case(b"ONCE") {
                once.set(word, Ok(()))?;
            } else if word.eq_ignore_ascii_case(b"WANTED") {
                wanted.set(word, Ok(()))?;
            } else if !other(word, &mut args)? {
                return Err(parse::unknown(word));
            }
        }
        let wait_mode = match (block.get(), queue.get()) {
            (None, None) => WaitMode::None,
            (Some(wait), None) => WaitMode::Block(wait),
            (None, Some(wait)) => WaitMode::Queue(wait),
            (Some(_), Some(_)) => return Err(CommandError::BlockAndQueue),
        };
        let (session, once) = (session.get(), once.get().is_some());
        if matches!(wait_mode, WaitMode::Queue(_)) && session.is_none() {
            return Err(CommandError::QueueWithoutSession);
        }
        Ok(Self {
            wait_mode,
            session,
            wanted: wanted_for(session, &wanted)?,
            once,
        })
    }
}

/// WANTED. It needs a session that can be told.
fn wanted_for(session: Option<SessionRef<'_>>, wanted: &Once<()>) -> Result<bool, CommandError> {
    match (wanted.is_set(), session) {
        (true, None) => Err(CommandError::WantedWithoutSession),
        (is_set, _) => Ok(is_set),
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
        let (mut mode, mut permits) = (ModeOption::new(), Once::new());
        let (mut token, mut lease) = (Once::new(), Once::new());
        while let Some(word) = args.option() {
            if word.eq_ignore_ascii_case(b"PERMITS") {
                let value = args.value(word)?;
                mode.add(Mode::Permits, word)?;
                permits.set(word, parse::permits(value))?;
            } else if word.eq_ignore_ascii_case(b"TOKEN") {
                token.set(word, parse::token(args.value(word)?))?;
            } else if word.eq_ignore_ascii_case(b"LEASE") {
                lease.set(word, parse::lease(args.value(word)?))?;
            } else if !mode.set(word)? {
                return Err(parse::unknown(word));
            }
        }
        Ok(Self {
            key,
            owner,
            mode: mode.get(owner)?,
            permits: permits.get(),
            token: token.get(),
            lease: lease.get(),
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
        let mut mode = ModeOption::new();
        let (mut token, mut session, mut wanted) = (Once::new(), Once::new(), Once::new());
        while let Some(word) = args.option() {
            if word.eq_ignore_ascii_case(b"TOKEN") {
                token.set(word, parse::token(args.value(word)?))?;
            } else if word.eq_ignore_ascii_case(b"SESSION") {
                session.set(word, parse::session(args.value(word)?))?;
            } else if word.eq_ignore_ascii_case(b"WANTED") {
                wanted.set(word, Ok(()))?;
            } else if !mode.set_without_number(word)? {
                return Err(parse::unknown(word));
            }
        }
        let (token, session) = (token.get(), session.get());
        let wanted = wanted_for(session, &wanted)?;
        let mode = mode.get(owner)?;
        Ok(Self {
            key,
            owner,
            lease,
            mode,
            token,
            session,
            wanted,
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
        let (mut mode, mut token) = (ModeOption::new(), Once::new());
        let mut place: usize = 4;
        loop {
            let word = args.option().ok_or(CommandError::NoCall)?;
            if word.eq_ignore_ascii_case(b"CALL") {
                break;
            }
            if word.eq_ignore_ascii_case(b"TOKEN") {
                token.set(word, parse::token(args.value(word)?))?;
                place = place.saturating_add(2);
            } else if mode.set_without_number(word)? {
                place = place.saturating_add(1);
            } else {
                return Err(parse::unknown(word));
            }
        }
        Ok(Self {
            key,
            owner,
            mode: mode.get(owner)?,
            token: token.get(),
            command: args.option().ok_or(CommandError::NoCall)?,
            place,
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
        let keys = keys(&mut args, 4)?;
        let AcquireOptions {
            wait_mode,
            session,
            wanted,
            once,
        } = AcquireOptions::parse(args, |_, _| Ok(false))?;
        Ok(Self {
            owner,
            lease,
            keys,
            wait_mode,
            session,
            wanted,
            once,
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
        let keys = keys(&mut args, 3)?;
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
        let keys = keys(&mut args, 4)?;
        let mut session = Once::new();
        while let Some(word) = args.option() {
            if word.eq_ignore_ascii_case(b"SESSION") {
                session.set(word, parse::session(args.value(word)?))?;
            } else {
                return Err(parse::unknown(word));
            }
        }
        Ok(Self {
            owner,
            lease,
            keys,
            session: session.get(),
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

/// Parses numkeys and the keys; the first key has the index `first`. Each key is returned once.
fn keys<'a, I: Iterator<Item = &'a [u8]>>(
    args: &mut Arguments<I>,
    first: usize,
) -> Result<Vec<NamedKey<'a>>, CommandError> {
    let count = parse::key_count(args.next()?)?;
    let mut seen = BTreeSet::new();
    let mut keys = Vec::with_capacity(count);
    for place in (first..).take(count) {
        let name = args.option().ok_or(CommandError::KeyCount)?;
        if seen.insert(name) {
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
        let mut mode = ModeOption::new();
        while let Some(word) = args.option() {
            if !mode.set_without_number(word)? {
                return Err(parse::unknown(word));
            }
        }
        let is_named = mode.0.is_some();
        let mode = is_named.then(|| mode.get(owner)).transpose()?;
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
        let request = Self {
            key: args.next()?,
            limit: parse::limit_or_none(args.next()?)?,
        };
        args.finish()?;
        Ok(request)
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
        let request = Self { key: args.next()? };
        args.finish()?;
        Ok(request)
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
        let (mut pattern, mut count) = (Once::new(), Once::new());
        while let Some(word) = args.option() {
            if word.eq_ignore_ascii_case(b"MATCH") {
                pattern.set(word, parse::pattern(args.value(word)?))?;
            } else if word.eq_ignore_ascii_case(b"COUNT") {
                count.set(word, parse::list_count(args.value(word)?))?;
            } else {
                return Err(parse::unknown(word));
            }
        }
        Ok(Self {
            pattern: pattern.get(),
            count: count.get(),
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
        let (mut epoch, mut after) = (Once::new(), Once::new());
        let (mut block, mut grace) = (Once::new(), Once::new());
        while let Some(word) = args.option() {
            if word.eq_ignore_ascii_case(b"EPOCH") {
                epoch.set(word, parse::epoch(args.value(word)?))?;
            } else if word.eq_ignore_ascii_case(b"AFTER") {
                let (life, seq) = (args.value(word)?, args.value(word)?);
                after.set(word, parse::moment(life, seq))?;
            } else if word.eq_ignore_ascii_case(b"BLOCK") {
                block.set(word, parse::wait(args.value(word)?))?;
            } else if word.eq_ignore_ascii_case(b"GRACE") {
                grace.set(word, parse::grace(args.value(word)?))?;
            } else {
                return Err(parse::unknown(word));
            }
        }
        Ok(Self {
            session,
            epoch: epoch.get(),
            after: after.get(),
            block: block.get(),
            grace_ms: grace.get().unwrap_or(0),
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
