//! Which commands of the server RLOCK.GUARD runs. The core decides by the traits that the server
//! reports of a command; the decision is remembered, so the server is asked once for each command.

use crate::ffi::{Args, Ctx, Key, KeyType, Str};
use crate::memory::state;
use rlock_core::guarded::{Guarded, is_own, refusal};
use rlock_core::{CommandError, NotGuarded};
use std::ffi::CStr;

/// A command that RLOCK.GUARD may run, with its words.
pub(crate) struct GuardedCommand<'a> {
    name: Name,
    words: Args<'a>,
    how: Guarded,
}

impl<'a> GuardedCommand<'a> {
    /// Checks the command with these words, its name first.
    ///
    /// Two decisions are not remembered: of a module's command, because another command may take
    /// its name, and of an unknown name, because it may be known later. All other commands stay the
    /// same.
    pub(crate) fn check(ctx: Ctx<'_>, words: Args<'a>) -> Result<Self, CommandError> {
        let first = words.at(0)?.bytes();
        let refused = |why| refusal(first, why);
        // For a name with a bar the server describes a command of a container, but would not run it
        // by that name.
        let name = Name::of(&[first]).filter(|name| !name.bytes().contains(&b'|'));
        let name = name.ok_or_else(|| refused(NotGuarded::Unknown))?;
        if is_own(name.bytes()) {
            return Err(refused(NotGuarded::Own));
        }
        let mut how = judge(ctx, &name).map_err(refused)?;
        if how == Guarded::Container {
            let second = words.at(1).map_err(|_| refused(NotGuarded::NotAboutKeys))?;
            let whole = [first, b"|", second.bytes()];
            let refused = |why| refusal(&whole.concat(), why);
            let whole = Name::of(&whole).ok_or_else(|| refused(NotGuarded::Unknown))?;
            how = judge(ctx, &whole).map_err(refused)?;
        }
        Ok(Self { name, words, how })
    }

    /// Runs the command, and passes its reply on.
    pub(crate) fn run(&self, ctx: Ctx<'_>) {
        if let Guarded::OfString(len) = self.how
            && self.words.len() == len
            && let Ok(key) = self.words.at(1)
            && is_no_string(ctx, key)
        {
            return ctx.reply_error(&CommandError::WrongType.to_string());
        }
        ctx.run_guarded(self.name.as_c_str(), self.words);
    }
}

fn is_no_string(ctx: Ctx<'_>, key: Str<'_>) -> bool {
    let key = Key::open_to_read(ctx, key);
    !matches!(key.key_type(), KeyType::Missing | KeyType::String)
}

fn judge(ctx: Ctx<'_>, name: &Name) -> Result<Guarded, NotGuarded> {
    let known = state::with(|state| state.guarded.get(name.bytes()).copied());
    if let Some(known) = known {
        return known;
    }
    let traits = ctx.command_traits(name.bytes());
    let traits = traits.ok_or(NotGuarded::Unknown)?;
    let judged = traits.guarded();
    if !traits.of_module {
        state::with(|state| state.guarded.insert(name.bytes().into(), judged));
    }
    judged
}

/// The name of a command in lower case. It is on the stack, because each call needs it for the
/// look-up.
struct Name {
    /// All bytes after the name are zero, so that it is also a C string.
    buffer: [u8; NAME_LEN_MAX + 1],
    len: usize,
}

/// No command of a server has a longer name, including the name of its container.
const NAME_LEN_MAX: usize = 63;

impl Name {
    /// None if no command of a server can have this name.
    fn of(parts: &[&[u8]]) -> Option<Self> {
        let (mut buffer, mut len) = ([0; NAME_LEN_MAX + 1], 0_usize);
        for part in parts {
            let end = len
                .checked_add(part.len())
                .filter(|end| *end <= NAME_LEN_MAX)?;
            let place = buffer.get_mut(len..end)?;
            place.copy_from_slice(part);
            len = end;
        }
        let name = buffer.get_mut(..len)?;
        name.make_ascii_lowercase();
        (!name.contains(&0)).then_some(Self { buffer, len })
    }

    fn bytes(&self) -> &[u8] {
        self.buffer.get(..self.len).unwrap_or_default()
    }

    fn as_c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.buffer).unwrap_or_default()
    }
}
