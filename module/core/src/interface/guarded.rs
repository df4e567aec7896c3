//! Which commands of the server may be run by a module that has looked at a lock before.
//!
//! What the server tells of a command decides, and not a list of names: so a command that a later
//! server brings is judged like the others. Four things must never be run, since they would stop a
//! server, or leave its client without a reply; each was seen:
//!
//! - a script whose client disconnects while it runs
//! - `WAIT` and `WAITAOF`
//! - what blocks a client without asking whether it may, as commands of modules do
//! - a command of ours, within which another could be, and so on

use crate::interface::error::{CommandError, NotGuarded};
use crate::values::names::OWN_PREFIX;
use crate::values::word::Word;

/// What the server tells of a command: `COMMAND INFO`.
#[allow(
    clippy::struct_excessive_bools,
    reason = "the flags of a command, as the server tells them"
)]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CommandTraits {
    /// What it is called, in lower case: also if it was renamed.
    pub name: Box<[u8]>,
    /// It reads keys.
    pub reads: bool,
    /// It writes keys.
    pub writes: bool,
    /// It cannot be run from a script.
    pub no_script: bool,
    /// It is for operators.
    pub admin: bool,
    /// A module brought it.
    pub of_module: bool,
    /// Its first argument names one of several commands, each with traits of its own.
    pub is_container: bool,
}

/// How a command that may be guarded is to be run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Guarded {
    /// As it is.
    Any,
    /// Its first argument says which command it is.
    Container,
    /// As it is, but if it has so many words, its name included, and its first key is of another
    /// type than a string, then it is to be refused: Valkey 8.1 and newer answer a module nothing
    /// at all then.
    OfString(usize),
}

/// Run scripts, by their names.
const SCRIPTS: [&[u8]; 6] = [
    b"eval",
    b"eval_ro",
    b"evalsha",
    b"evalsha_ro",
    b"fcall",
    b"fcall_ro",
];

/// About no keys, and harmless.
const HARMLESS: [&[u8]; 5] = [b"echo", b"ping", b"publish", b"spublish", b"time"];

impl CommandTraits {
    /// Whether the command may be guarded, and how.
    ///
    /// # Errors
    /// Why not.
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
        // Of a container its commands say whether they may.
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

/// Whether that is the name of a command of ours, in whatever case.
pub fn is_own(name: &[u8]) -> bool {
    name.get(..OWN_PREFIX.len())
        .is_some_and(|start| start.eq_ignore_ascii_case(OWN_PREFIX))
}

/// That this command cannot be guarded.
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
