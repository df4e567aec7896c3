//! The arguments of a command: first those that it requires, then options, which are words in any
//! order, each at most once.

use crate::interface::error::CommandError;
use crate::interface::event::Moment;
use crate::interface::parse::{self, repeated, unknown};
use crate::interface::stored_permits::{Permits, PermitsRequest};
use crate::values::ids::SessionRef;
use crate::values::mode::Mode;
use crate::values::names::WRITER_SUFFIX;
use crate::values::time::{Lease, Wait};
use crate::values::token::Token;
use crate::values::word::Word;

/// The arguments of a command, parsed from left to right.
pub(crate) struct Arguments<'a, I> {
    args: I,
    /// The options that were read.
    options: Options<'a>,
    /// The index of the last one that was taken, among the words of the command, whose name has
    /// index 0.
    pub(crate) place: usize,
}

impl<'a, I: Iterator<Item = &'a [u8]>> Arguments<'a, I> {
    pub(crate) fn new(args: I) -> Self {
        Self {
            args,
            options: Options::default(),
            place: 0,
        }
    }

    /// The next required argument.
    pub(crate) fn next(&mut self) -> Result<&'a [u8], CommandError> {
        // Not with `ok_or`: it would build an error and drop it again for each argument.
        match self.option() {
            Some(arg) => Ok(arg),
            None => Err(CommandError::WrongArity),
        }
    }

    /// The word of the next option; none if there are no more arguments.
    pub(crate) fn option(&mut self) -> Option<&'a [u8]> {
        self.place = self.place.saturating_add(1);
        self.args.next()
    }

    /// The value that must follow the word of an option.
    pub(crate) fn value(&mut self, word: &[u8]) -> Result<&'a [u8], CommandError> {
        self.option()
            .ok_or_else(|| CommandError::MissingValue(Word::new(word)))
    }

    /// Refuses any further option.
    pub(crate) fn no_option(mut self) -> Result<(), CommandError> {
        self.option().map_or(Ok(()), |word| Err(unknown(word)))
    }

    /// Refuses any further argument.
    pub(crate) fn finish(mut self) -> Result<(), CommandError> {
        self.option()
            .map_or(Ok(()), |_| Err(CommandError::WrongArity))
    }

    /// Reads the options that have these names, to the end or until CALL.
    #[inline]
    pub(crate) fn options(&mut self, names: &[Name]) -> Result<&Options<'a>, CommandError> {
        if let Some(word) = self.option() {
            self.options_from(word, names)?;
        }
        Ok(&self.options)
    }

    fn options_from(&mut self, first: &'a [u8], names: &[Name]) -> Result<(), CommandError> {
        let mut next = Some(first);
        while let Some(word) = next {
            let name = name(word);
            if !names.contains(&name) {
                return Err(unknown(word));
            }
            if name == CALL {
                break;
            }
            self.add_option(name, word, names)?;
            next = self.option();
        }
        Ok(())
    }

    #[inline]
    fn add_option(&mut self, name: Name, word: &[u8], names: &[Name]) -> Result<(), CommandError> {
        match name {
            READ => self.options.add_mode(Mode::Read, word),
            WRITE => self.options.add_mode(Mode::Write, word),
            PERMITS if names.contains(&COUNTED) => {
                let value = self.value(word)?;
                self.options.add_mode(Mode::Permits, word)?;
                self.options.permits = Some(parse::permits(value)?);
                Ok(())
            }
            PERMITS => self.options.add_mode(Mode::Permits, word),
            OF => self.read(word, |of| &mut of.limit, parse::limit),
            BLOCK => self.read(word, |of| &mut of.block, parse::wait),
            QUEUE => self.read(word, |of| &mut of.queue, parse::wait),
            SESSION => self.read(word, |of| &mut of.session, parse::session),
            WANTED => set(word, &mut self.options.wanted, Ok(())),
            ONCE => set(word, &mut self.options.once, Ok(())),
            TOKEN => self.read(word, |of| &mut of.token, parse::token),
            LEASE => self.read(word, |of| &mut of.lease, parse::lease),
            MATCH => self.read(word, |of| &mut of.pattern, parse::pattern),
            COUNT => self.read(word, |of| &mut of.count, parse::list_count),
            EPOCH => self.read(word, |of| &mut of.epoch, parse::epoch),
            AFTER => {
                let (life, seq) = (self.value(word)?, self.value(word)?);
                set(word, &mut self.options.after, parse::moment(life, seq))
            }
            GRACE => self.read(word, |of| &mut of.grace_ms, parse::grace),
            _ => Err(unknown(word)),
        }
    }

    /// Reads the value of an option into its field.
    #[inline]
    fn read<T>(
        &mut self,
        word: &[u8],
        field: for<'o> fn(&'o mut Options<'a>) -> &'o mut Option<T>,
        parse: fn(&'a [u8]) -> Result<T, CommandError>,
    ) -> Result<(), CommandError> {
        let value = parse(self.value(word)?);
        set(word, field(&mut self.options), value)
    }
}

/// The name of an option, as a number: numbers are compared faster than texts.
pub(crate) type Name = u64;

/// The letters in capitals, after a one. Zero, which is no option, if the word is too long.
const fn name(word: &[u8]) -> Name {
    if word.len() > 7 {
        return 0;
    }
    let (mut name, mut rest) = (1, word);
    while let [letter, others @ ..] = rest {
        // Without this bit a small letter is a capital, and no other byte becomes a letter.
        name = name << 8 | Name::from_be_bytes([0, 0, 0, 0, 0, 0, 0, *letter & !0x20]);
        rest = others;
    }
    name
}

macro_rules! names {
    ($($name:ident)*) => {
        $(pub(crate) const $name: Name = name(stringify!($name).as_bytes());)*
    };
}

names! {
    READ WRITE PERMITS OF BLOCK QUEUE SESSION WANTED ONCE TOKEN LEASE MATCH COUNT EPOCH AFTER GRACE
    CALL
}

/// Among the names of a command's options: a number follows the word PERMITS. Otherwise that names
/// only the kind.
pub(crate) const COUNTED: Name = 0;

/// The options that a command was given.
#[derive(Default)]
pub(crate) struct Options<'a> {
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

/// Stores the value of an option. A second time is an error, whatever the value.
#[inline]
fn set<T>(
    word: &[u8],
    option: &mut Option<T>,
    value: Result<T, CommandError>,
) -> Result<(), CommandError> {
    if option.is_some() {
        return Err(repeated(word));
    }
    *option = Some(value?);
    Ok(())
}

impl Options<'_> {
    /// READ, WRITE or PERMITS: only one of them.
    fn add_mode(&mut self, mode: Mode, word: &[u8]) -> Result<(), CommandError> {
        match self.mode.replace(mode) {
            None => Ok(()),
            Some(before) if before == mode => Err(repeated(word)),
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
