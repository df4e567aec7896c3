//! Commands of the server that RLOCK.GUARD runs.

use super::call::CallReply;
use super::{Args, Ctx, OwnedStr, server};
use redis_module::raw;
use rlock_core::guarded::CommandTraits;
use std::ffi::CStr;

impl Ctx<'_> {
    /// What the server tells of a command; none if it knows none of this name, or tells nothing
    /// because an operator has renamed `COMMAND`. One of a container is named `container|command`.
    pub(crate) fn command_traits(self, name: &[u8]) -> Option<CommandTraits> {
        let (command, format) = (c"COMMAND".as_ptr(), c"cs".as_ptr());
        let (info, name) = (c"INFO".as_ptr(), OwnedStr::new(name));
        let name = name.as_str().raw;
        let reply = server!(RedisModule_Call(self.raw, command, format, info, name));
        let reply = CallReply::of(reply)?;
        traits_of(&*reply.element(0)?)
    }

    /// Runs a command of the server in the name of the caller and replies as it does. The first of
    /// these words is its name.
    ///
    /// It is replicated as if it had come alone (`!`), obeys the limits of memory (`M`) and those
    /// of scripts (`S`), and answers in the caller's protocol (`0`); what is wrong with it comes as
    /// a reply (`E`). It may do what the caller may (`C`), if there is one: another module's call
    /// has none, and may do anything.
    pub(crate) fn run_guarded(self, command: &CStr, words: Args<'_>) {
        let mut reply = self.call_guarded(c"!CEMS0v", command, words);
        let is_in_nobodys_name = |reply: &CallReply| reply.wire().starts_with(NO_USER);
        if reply.as_ref().is_some_and(is_in_nobodys_name) && !self.has_user() {
            reply = self.call_guarded(c"!EMS0v", command, words);
        }
        match reply {
            Some(reply) => self.pass_on(&reply),
            None => self.reply_error("ERR the server has not run the command"),
        }
    }

    fn call_guarded(self, format: &CStr, command: &CStr, words: Args<'_>) -> Option<CallReply> {
        let (words, len) = words.from(1).as_list();
        let (command, format) = (command.as_ptr(), format.as_ptr());
        CallReply::of(server!(RedisModule_Call(
            self.raw, command, format, words, len
        )))
    }

    /// Replies what a command of the server has replied to us.
    fn pass_on(self, reply: &CallReply) {
        match reply.wire() {
            // A client that gets no reply takes the next one for it.
            [] => self.reply_error("ERR the server has run the command and given no reply"),
            // The server has its own word for this, but tells a module another.
            [b'-', ..] if reply.text().starts_with(ACL_REFUSAL) => {
                let why = reply.text().strip_prefix(ACL_REFUSAL).unwrap_or_default();
                self.reply_error(&format!("NOPERM {}", String::from_utf8_lossy(why)));
            }
            _ => {
                server!(RedisModule_ReplyWithCallReply(self.raw, reply.0));
            }
        }
    }
}

/// What a call in the name of nobody is answered.
const NO_USER: &[u8] = b"-ERR cannot run as user";

/// How a refusal by the ACL begins.
const ACL_REFUSAL: &[u8] = b"ERR acl verification failed, ";

/// Reads `[name, arity, [flag, ...], ..., [subcommand, ...]]`.
fn traits_of(info: &CallReply) -> Option<CommandTraits> {
    let (name, flags) = (info.element(0)?, info.element(2)?);
    let mut traits = CommandTraits {
        name: name.text().to_ascii_lowercase().into(),
        is_container: info.element(9).is_some_and(|commands| commands.len() > 0),
        ..CommandTraits::default()
    };
    for place in 0..flags.len() {
        match flags.element(place)?.text() {
            b"readonly" => traits.reads = true,
            b"write" => traits.writes = true,
            b"noscript" => traits.no_script = true,
            b"admin" => traits.admin = true,
            b"module" => traits.of_module = true,
            _ => {}
        }
    }
    Some(traits)
}
