//! The bounds of a search: how many of everything, and how often each thing may happen; and the
//! rules of the protocol that are in force.

use crate::message::{CONTENDER, Mode, Names, Subject};

/// A struct of small numbers that are set by their names.
macro_rules! numbers {
    ($(#[$doc:meta])* $name:ident { $($(#[$of:meta])* $field:ident = $value:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, Hash)]
        pub struct $name { $($(#[$of])* pub $field: u8,)* }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: $value,)* }
            }
        }

        impl $name {
            /// All names, with what each stands for at first.
            pub const NAMES: &[(&str, u8)] = &[$((stringify!($field), $value),)*];

            fn set(&mut self, name: &str, value: u8) -> bool {
                match name {
                    $(stringify!($field) => self.$field = value,)*
                    _ => return false,
                }
                true
            }
        }
    };
}

numbers! {
    /// How often each may happen in one run. Arriving messages, noticing that a connection is
    /// closed, and unlocking are not bounded.
    Budget {
        /// Calls of `lock()`.
        calls = 1,
        /// Futures of `lock()` that are dropped, or whose time is up.
        drops = 0,
        /// Connections that the client gives up, or the server loses. The other side notices later.
        cuts = 0,
        /// Restarts of a server, with and without its stored holds.
        restarts = 0,
        /// Failovers, at most one: new connections reach the new primary, old ones the deposed.
        failovers = 0,
        /// Holds that BREAK ends.
        breaks = 0,
        /// Ticks of the clock.
        ticks = 0,
        /// Renewals by the watchdog.
        renews = 0,
        /// Waits whose time is up at the server.
        timeouts = 0,
        /// ACQUIREs that the server refuses with an error, as `OOM`.
        errors = 0,
        /// Times that the slot of the locks moves to the other node.
        moves = 0,
        /// Times that a contender on a plain connection takes a lock or queues for it.
        plain = 0,
        /// Sessions whose unacknowledged events are too many.
        overflows = 0,
    }
}

numbers! {
    /// How many of everything there are.
    Size {
        /// Clients, each with a session.
        clients = 1,
        /// Owners of each client.
        owners = 1,
        /// Names of locks.
        names = 1,
        /// 1: calls may also ask for all names at once.
        joint = 0,
        /// 1: the names are read-write locks.
        read_write = 0,
        /// Nodes of the cluster, 1 or 2. All locks are in one slot.
        nodes = 1,
        /// 1: a call enters a hold of its owner again.
        reentry = 0,
        /// Length of a lease, in ticks.
        lease = 2,
        /// Length of the grace, in ticks.
        grace = 1,
        /// Clients from this number on lose no connection.
        faulty = 9,
        /// Runs are cut off where a client binds more often; the report counts them.
        binds = 8,
    }
}

/// Rules of the protocol that look like details: each is a field, true while it is in force.
macro_rules! rules {
    ($($(#[$doc:meta])* $rule:ident,)*) => {
        /// Sentences of the protocol. Each can be switched off, which shows its purpose.
        #[derive(Clone, Debug)]
        #[allow(clippy::struct_excessive_bools, reason = "each is a sentence of its own")]
        pub struct Rules { $($(#[$doc])* pub $rule: bool,)* }

        impl Default for Rules {
            fn default() -> Self {
                Self { $($rule: true,)* }
            }
        }

        impl Rules {
            /// The names of all rules.
            pub const NAMES: &[&str] = &[$(stringify!($rule),)*];

            fn switch_off(&mut self, name: &str) -> bool {
                match name {
                    $(stringify!($rule) => self.$rule = false,)*
                    _ => return false,
                }
                true
            }
        }
    };
}

rules! {
    /// AFTER names the life in which the events were heard; in another life the server drops none.
    after_life,
    /// The reply to a queued ACQUIRE names the life that its seq counts in.
    queued_life,
    /// An event up to a wait's seq is not about this wait.
    compare_seq,
    /// Events that are heard before the reply to their ACQUIRE are kept until then.
    keep_events,
    /// So are `lost` events.
    keep_losses,
    /// A waiter and a newcomer enter only when nobody is before them.
    fifo,
    /// When a waiter leaves the queue, those that it held up are granted at once.
    leave_lets_in,
    /// CANCEL names the mode of the wait.
    cancel_mode,
    /// A MACQUIRE with ONCE that takes some of its names anew gives its token to all of them.
    joint_token,
    /// A wait for several locks that times out is undone: an earlier copy may have been granted,
    /// and have lost only some of them since.
    undo_timed_out,
    /// A call whose ACQUIRE got an error is undone: an earlier copy may have run.
    undo_failed,
    /// Re-entry is counted in the client: the last guard of a hold releases it.
    count_guards,
    /// A call for several locks counts as a guard of those that it enters again from its beginning.
    count_at_once,
    /// A slot that moves away is told to the sessions that hold its locks; they renew there.
    moved_told,
    /// An event is about waits and holds at the node that told it: another node may have the same
    /// life, and the same token.
    event_node,
    /// An ACQUIRE that is answered MOVED goes to the other node only while its call goes on.
    moved_undone,
    /// Once RENEW goes to another node, the session of the old one confirms the hold no more.
    moved_grace,
    /// EVENTS with a smaller EPOCH is refused.
    epoch,
    /// EVENTS answers at once if the life named by AFTER is not the session's.
    new_life_at_once,
    /// A wait that ONCE of the same session takes over tells no event.
    takeover_silent,
    /// After an overflow of events the session's holds stay for its grace.
    overflow_grace,
    /// BIND closes the connection that was bound before.
    bind_closes,
    /// Nothing is sent on a command connection before BIND has answered.
    bind_waits,
    /// Commands are sent only while BIND's life is the session's; in another the client binds anew.
    bind_life,
    /// An owner locks a name again only after its RELEASE, or its undo, is answered.
    gate,
    /// RELEASE and RENEW name the token. The second line of defence behind `gate`.
    token,
    /// An undo is sent again on each new connection until it is answered.
    undo_until_answered,
    /// A call whose ACQUIRE got NOSESSION is undone like any other: an earlier copy may have run.
    undo_refused,
    /// The lease of a grant told by an event counts from the EVENTS call answered *before* the one
    /// that tells it.
    grant_since_before,
}

/// The bounds and the rules of a search.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    /// How many of everything.
    pub size: Size,
    /// How often each thing may happen.
    pub budget: Budget,
    /// The rules in force.
    pub rules: Rules,
    /// Whether the search ends at its first violation.
    pub first: bool,
}

impl Setup {
    /// Reads options as `--calls=2 --off=gate,token --first`.
    ///
    /// # Errors
    ///
    /// The option that it does not know.
    pub fn parse<'a>(options: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        let mut setup = Self::default();
        for option in options {
            let text = option.strip_prefix("--").unwrap_or(option);
            let (name, value) = text.split_once('=').unwrap_or((text, ""));
            let known = match (name, value.parse()) {
                ("first", _) => {
                    setup.first = true;
                    true
                }
                ("off", _) => value.split(',').all(|rule| setup.rules.switch_off(rule)),
                (name, Ok(n)) => setup.budget.set(name, n) || setup.size.set(name, n),
                _ => false,
            };
            if !known {
                return Err(format!("unknown option {option}"));
            }
        }
        Ok(setup)
    }

    /// All clients, by number.
    pub(crate) fn clients(&self) -> std::ops::Range<usize> {
        0..self.size.clients.into()
    }

    /// All that the owners of a client may ask for. No two clients share an owner.
    pub(crate) fn subjects(&self, client: usize) -> Vec<Subject> {
        let (client, owners) = (u8::try_from(client).expect("few"), self.size.owners);
        let mut names: Vec<_> = (0..self.size.names).map(Names::one).collect();
        names.extend((self.size.joint == 1).then_some(Names::up_to(self.size.names)));
        let mut subjects = vec![];
        for owner in client * owners..(client + 1) * owners {
            for &names in &names {
                subjects.extend(
                    self.modes()
                        .iter()
                        .map(|&mode| Subject { names, owner, mode }),
                );
            }
        }
        subjects
    }

    fn modes(&self) -> &'static [Mode] {
        if self.size.read_write == 1 {
            &[Mode::Read, Mode::Write]
        } else {
            &[Mode::Plain]
        }
    }

    /// The contender's hold or wait. It never reads.
    pub(crate) fn contender(&self, name: u8) -> Subject {
        let mode = if self.size.read_write == 1 {
            Mode::Write
        } else {
            Mode::Plain
        };
        Subject {
            names: Names::one(name),
            owner: CONTENDER,
            mode,
        }
    }
}
