//! Commands of the server that RLOCK.GUARD runs.

use super::reply::CallReply;
use super::value::{elements, text};
use super::{Args, Ctx, server};
use rlock_core::guarded::CommandTraits;
use std::ffi::CStr;

impl Ctx<'_> {
    /// The traits of a command, as the server reports them; none if the server does not know the
    /// name, or if an operator has renamed `COMMAND`. A command of a container has the name
    /// `container|command`.
    ///
    /// The server tells of each command `[name, arity, [flag, ...], ..., [subcommand, ...]]`.
    pub(crate) fn command_traits(self, name: &[u8]) -> Option<CommandTraits> {
        let reply = self.context().call("COMMAND", &[b"INFO", name]).ok()?;
        let info = elements(elements(&reply).first()?);
        let [name, _, flags, ..] = info else {
            return None;
        };
        let flags = elements(flags).iter().filter_map(text);
        let has = |flag| flags.clone().any(|of| of == flag);
        Some(CommandTraits {
            name: text(name)?.to_ascii_lowercase().into_bytes().into(),
            reads: has("readonly"),
            writes: has("write"),
            no_script: has("noscript"),
            admin: has("admin"),
            of_module: has("module"),
            is_container: info.get(9).is_some_and(|of| !elements(of).is_empty()),
        })
    }
    /// Runs a command of the server in the name of the caller, and passes its reply on. The first
    /// of these words is its name.
    ///
    /// The command is replicated as if it had come alone (`!`). It obeys the limits of memory (`M`)
    /// and those of scripts (`S`), and answers in the caller's protocol (`0`); errors come as a
    /// reply (`E`). It has the permissions of the caller's user (`C`). A call that another module
    /// makes may have no user, and then the command may do anything.
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

    /// Replies with the reply of a command.
    fn pass_on(self, reply: &CallReply) {
        match reply.wire() {
            // Without a reply, the client would take the next command's reply for this one's.
            [] => self.reply_error("ERR the server has run the command and given no reply"),
            // For this error the server gives a module another text than a client.
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

/// The reply to a call with `C` that has no user.
const NO_USER: &[u8] = b"-ERR cannot run as user";

/// The beginning of a refusal by the ACL.
const ACL_REFUSAL: &[u8] = b"ERR acl verification failed, ";
