//! Which commands of the server RLOCK.GUARD may run after it has checked a lock.
//!
//! The server's own description of a command decides, apart from a few names below. So a command of
//! a later server version is judged like the others. Four kinds of command must never be run,
//! because they would stop the server, or leave its client without a reply. Each of these was seen:
//!
//! - a script whose client disconnects while it runs
//! - `WAIT` and `WAITAOF`
//! - a command that blocks its client without asking whether it may, as commands of modules do
//! - a command of ours: another one could be nested in it, and so on

use crate::interface::error::{CommandError, NotGuarded};
use crate::values::names::OWN_PREFIX;
use crate::values::word::Word;

/// The server's description of a command, from `COMMAND INFO`.
#[allow(
    clippy::struct_excessive_bools,
    reason = "the flags of a command, as the server tells them"
)]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandTraits {
    /// Its original name in lower case, even if it was renamed.
    pub name: Box<[u8]>,
    /// It reads keys.
    pub reads: bool,
    /// It writes keys.
    pub writes: bool,
    /// It cannot be run from a script.
    pub no_script: bool,
    /// It is for operators.
    pub admin: bool,
    /// It belongs to a module.
    pub of_module: bool,
    /// Its first argument names one of several commands, and each of these has its own traits.
    pub is_container: bool,
}

/// How to run a command that may be guarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guarded {
    /// As it is.
    Any,
    /// Its first argument says which command it is: that one must be judged.
    Container,
    /// As it is, unless it has this many words (its name included) and its first key holds another
    /// type than a string. Then it must be refused: Valkey 8.1 and newer send a module no reply at
    /// all in this case.
    OfString(usize),
}

/// The commands that run scripts.
const SCRIPTS: [&[u8]; 6] = [
    b"eval",
    b"eval_ro",
    b"evalsha",
    b"evalsha_ro",
    b"fcall",
    b"fcall_ro",
];

/// Harmless commands that are not about keys.
const HARMLESS: [&[u8]; 5] = [b"echo", b"ping", b"publish", b"spublish", b"time"];

impl CommandTraits {
    /// Whether the command may be guarded, and how.
    ///
    /// # Errors
    /// The reason for which it cannot be guarded.
    pub fn guarded(&self) -> Result<Guarded, NotGuarded> {
        if is_own(&self.name) {
            return Err(NotGuarded::Own);
        }
        if SCRIPTS.contains(&&*self.name) {
            return Err(NotGuarded::Script);
        }
        if self.of_module {
            return Err(NotGuarded::OfModule);
        }
        // A container's commands are judged one by one.
        if self.is_container {
            return Ok(Guarded::Container);
        }
        if self.no_script {
            return Err(NotGuarded::NotFromScripts);
        }
        if HARMLESS.contains(&&*self.name) {
            return Ok(Guarded::Any);
        }
        if self.admin || !(self.reads || self.writes) {
            return Err(NotGuarded::NotAboutKeys);
        }
        match &*self.name {
            b"getdel" => Ok(Guarded::OfString(2)),
            b"getset" => Ok(Guarded::OfString(3)),
            _ => Ok(Guarded::Any),
        }
    }
}

/// Whether this is the name of one of our commands, in upper or lower case.
pub fn is_own(name: &[u8]) -> bool {
    name.get(..OWN_PREFIX.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(OWN_PREFIX))
}

/// The refusal of a command that cannot be guarded.
pub fn refusal(command: &[u8], why: NotGuarded) -> CommandError {
    CommandError::NotGuarded(Word::new(command), why)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(name: &str, change: impl FnOnce(&mut CommandTraits)) -> Result<Guarded, NotGuarded> {
        let mut traits = CommandTraits {
            name: name.as_bytes().into(),
            ..CommandTraits::default()
        };
        change(&mut traits);
        traits.guarded()
    }

    #[test]
    fn what_reads_or_writes_keys_may_be_guarded_and_nothing_that_stops_a_server() {
        let writes = |traits: &mut CommandTraits| traits.writes = true;
        assert_eq!(of("set", writes), Ok(Guarded::Any));
        assert_eq!(of("get", |traits| traits.reads = true), Ok(Guarded::Any));
        assert_eq!(of("getdel", writes), Ok(Guarded::OfString(2)));
        assert_eq!(of("getset", writes), Ok(Guarded::OfString(3)));
        assert_eq!(of("ping", |_| ()), Ok(Guarded::Any));
        // Neither WAIT nor SELECT has a flag that says more.
        assert_eq!(of("wait", |_| ()), Err(NotGuarded::NotAboutKeys));
        assert_eq!(of("rlock.acquire", writes), Err(NotGuarded::Own));
        for script in SCRIPTS {
            let script = std::str::from_utf8(script).expect("a name");
            let reads = |traits: &mut CommandTraits| traits.reads = true;
            assert_eq!(of(script, reads), Err(NotGuarded::Script));
        }
        for (flag, expected) in [
            ("noscript", Err(NotGuarded::NotFromScripts)),
            ("module", Err(NotGuarded::OfModule)),
            ("admin", Err(NotGuarded::NotAboutKeys)),
            ("container", Ok(Guarded::Container)),
        ] {
            let found = of("any", |traits| {
                traits.writes = true;
                traits.no_script = flag == "noscript";
                traits.of_module = flag == "module";
                traits.admin = flag == "admin";
                traits.is_container = flag == "container";
            });
            assert_eq!(found, expected, "{flag}");
        }
    }

    #[test]
    fn our_own_commands_are_known_in_any_case_and_no_others() {
        for (name, expected) in [
            (&b"RLOCK.GUARD"[..], true),
            (b"rlock.", true),
            (b"rLock.x", true),
            (b"rlock", false),
            (b"set", false),
            (b"", false),
        ] {
            assert_eq!(is_own(name), expected);
        }
    }
}
