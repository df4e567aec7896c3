//! The options of commands: words after the required arguments, in any order, each at most once.

use crate::interface::error::CommandError;
use crate::interface::event::Moment;
use crate::interface::parse::{self, Arguments};
use crate::interface::stored_permits::{Permits, PermitsRequest};
use crate::values::ids::SessionRef;
use crate::values::mode::Mode;
use crate::values::names::WRITER_SUFFIX;
use crate::values::time::{Lease, Wait};
use crate::values::token::Token;

/// The options that a command was given.
#[derive(Default)]
pub(crate) struct Options<'a> {
    /// Whether a number follows the word PERMITS. Otherwise that names only the kind.
    counts_permits: bool,
    pub(crate) mode: Option<Mode>,
    pub(crate) permits: Option<Permits>,
    limit: Option<Permits>,
    pub(crate) block: Option<Wait>,
    pub(crate) queue: Option<Wait>,
    pub(crate) session: Option<SessionRef<'a>>,
    wanted: Option<()>,
    pub(crate) once: Option<()>,
    pub(crate) token: Option<Token>,
    pub(crate) lease: Option<Lease>,
    pub(crate) pattern: Option<&'a [u8]>,
    pub(crate) count: Option<usize>,
    pub(crate) epoch: Option<u64>,
    pub(crate) after: Option<Moment>,
    pub(crate) grace_ms: Option<i64>,
}

impl<'a> Options<'a> {
    /// No options yet, for a command in which a number follows the word PERMITS.
    pub(crate) fn counting_permits() -> Self {
        Self {
            counts_permits: true,
            ..Self::default()
        }
    }

    /// Reads the options that have these names, to the end or until CALL.
    #[inline]
    pub(crate) fn read<I: Iterator<Item = &'a [u8]>>(
        &mut self,
        args: &mut Arguments<I>,
        names: &[&'static str],
    ) -> Result<(), CommandError> {
        while let Some(word) = args.option() {
            let mut known = names.iter();
            let name = known.find(|name| word.eq_ignore_ascii_case(name.as_bytes()));
            match *name.ok_or_else(|| parse::unknown(word))? {
                // The commonest first: they are compared one after the other.
                "SESSION" => args.read(word, &mut self.session, parse::session)?,
                "BLOCK" => args.read(word, &mut self.block, parse::wait)?,
                "QUEUE" => args.read(word, &mut self.queue, parse::wait)?,
                "ONCE" => parse::set(word, &mut self.once, Ok(()))?,
                "TOKEN" => args.read(word, &mut self.token, parse::token)?,
                "READ" => self.add_mode(Mode::Read, word)?,
                "WRITE" => self.add_mode(Mode::Write, word)?,
                "PERMITS" if self.counts_permits => {
                    let value = args.value(word)?;
                    self.add_mode(Mode::Permits, word)?;
                    self.permits = Some(parse::permits(value)?);
                }
                "PERMITS" => self.add_mode(Mode::Permits, word)?,
                "OF" => args.read(word, &mut self.limit, parse::limit)?,
                "WANTED" => parse::set(word, &mut self.wanted, Ok(()))?,
                "LEASE" => args.read(word, &mut self.lease, parse::lease)?,
                "MATCH" => args.read(word, &mut self.pattern, parse::pattern)?,
                "COUNT" => args.read(word, &mut self.count, parse::list_count)?,
                "EPOCH" => args.read(word, &mut self.epoch, parse::epoch)?,
                "AFTER" => {
                    let (life, seq) = (args.value(word)?, args.value(word)?);
                    parse::set(word, &mut self.after, parse::moment(life, seq))?;
                }
                "GRACE" => args.read(word, &mut self.grace_ms, parse::grace)?,
                _ => break,
            }
        }
        Ok(())
    }

    /// READ, WRITE or PERMITS: only one of them.
    fn add_mode(&mut self, mode: Mode, word: &[u8]) -> Result<(), CommandError> {
        match self.mode.replace(mode) {
            None => Ok(()),
            Some(before) if before == mode => Err(parse::repeated(word)),
            Some(before) if before == Mode::Permits || mode == Mode::Permits => {
                Err(CommandError::PermitsAndMode)
            }
            Some(_) => Err(CommandError::ReadAndWrite),
        }
    }

    /// The mode, if this owner can hold a lock in it.
    #[inline]
    pub(crate) fn mode(&self, owner: &[u8]) -> Result<Mode, CommandError> {
        match self.mode.unwrap_or(Mode::Plain) {
            Mode::Read | Mode::Write if owner.ends_with(WRITER_SUFFIX) => {
                Err(CommandError::OwnerOfWriter)
            }
            mode => Ok(mode),
        }
    }

    /// PERMITS and OF. A request cannot be larger than the limit that it names.
    pub(crate) fn asked(&self) -> Result<Option<PermitsRequest>, CommandError> {
        match (self.permits, self.limit) {
            (None, None) => Ok(None),
            (None, Some(_)) => Err(CommandError::LimitWithoutPermits),
            (Some(permits), Some(limit)) if permits > limit => {
                Err(CommandError::PermitsOverLimit(limit.get()))
            }
            (Some(permits), limit) => Ok(Some(PermitsRequest { permits, limit })),
        }
    }

    /// WANTED. It needs a session that can be told.
    pub(crate) fn wanted(&self) -> Result<bool, CommandError> {
        match (self.wanted, self.session) {
            (Some(()), None) => Err(CommandError::WantedWithoutSession),
            (wanted, _) => Ok(wanted.is_some()),
        }
    }
}
