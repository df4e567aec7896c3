//! The properties: some states must never be reached, and nothing may be left over once the faults
//! have ended.

use crate::acts::Act;
use crate::client::{Held, Phase, Renewal};
use crate::locks::{Hold, Locks, Wait};
use crate::server::{PROMOTED, Server, Session};
use crate::setup::{Budget, Setup};
use crate::world::{End, World};

/// Steps without a fault after which a run is called endless.
const STEPS_MAX: usize = 300;

impl World {
    /// A property that this state breaks.
    pub(crate) fn violation(&self, setup: &Setup) -> Option<&'static str> {
        let of_servers = self.servers.iter().find_map(|server| server.violation);
        let of_clients = self.clients.iter().find_map(|client| client.violation);
        let of_locks = self
            .servers
            .iter()
            .find_map(|server| Self::of_locks(&server.locks));
        of_servers
            .or(of_clients)
            .or(of_locks)
            .or_else(|| self.of_guards(setup))
    }

    /// P1: one owner, or readers; and nobody waits for a lock that it could have.
    fn of_locks(locks: &Locks) -> Option<&'static str> {
        let is_shared = |a: &Hold| {
            let others = locks
                .holds
                .iter()
                .filter(|b| b.subject.owner != a.subject.owner);
            others.clone().any(|b| b.keeps_out(a.subject))
        };
        if locks.holds.iter().any(is_shared) {
            return Some("P1: two owners hold one lock");
        }
        let could_have = |(i, wait): (usize, &Wait)| {
            wait.subject.each().all(|one| {
                let is_kept_out = locks.holds.iter().any(|hold| hold.keeps_out(one));
                !locks.is_behind(one, i) && !is_kept_out
            })
        };
        if locks.waits.iter().enumerate().any(could_have) {
            return Some("a waiter waits for a free lock");
        }
        locks.violation
    }

    /// P2: a guard that says held is right.
    fn of_guards(&self, setup: &Setup) -> Option<&'static str> {
        let mut guards = self.clients.iter().flat_map(|client| &client.holds);
        let is_wrong = |held: &&Held| held.says_held(setup) && !self.may_say_held(held);
        guards
            .find(is_wrong)
            .map(|_| "P2: a guard says held, and the server has ended its hold")
    }

    fn may_say_held(&self, held: &Held) -> bool {
        let server = self.primary();
        let ended = (held.subject.names, held.token);
        // Not promised: asynchronous replication can lose what the deposed primary granted.
        let is_of_deposed = server.lives >= PROMOTED && held.life <= PROMOTED;
        self.is_there(held)
            || is_of_deposed
            || self.servers.iter().any(|s| s.excused.contains(&ended))
    }

    /// Whether the server has the hold of this guard.
    fn is_there(&self, held: &Held) -> bool {
        let found = self.primary().locks.hold(held.subject);
        found.is_some_and(|hold| hold.token == held.token)
    }

    /// From here on there is no fault and no new call, everything arrives, guards are unlocked, and
    /// *no time passes*: a lease or a grace that ends must not be needed. Then nothing may be left
    /// over. The steps that it took are put behind `log`.
    pub(crate) fn drain(&mut self, setup: &Setup, log: &mut Vec<Act>) -> Option<&'static str> {
        self.left = Budget {
            calls: 0,
            ..Budget::default()
        };
        for _ in 0..STEPS_MAX {
            let ordered = self
                .acts(setup)
                .into_iter()
                .filter_map(|act| Some((self.rank(act, setup)?, act)));
            let Some((rank, act)) = ordered.min_by_key(|(rank, _)| *rank) else {
                if self.release_inherited(setup) {
                    continue;
                }
                return self.left_over();
            };
            if rank == Rank::Program && self.guard_was_not_told(setup) {
                return Some("a guard is never told that its hold is lost");
            }
            log.push(act);
            self.act(act, setup);
            if let Some(violation) = self.violation(setup) {
                return Some(violation);
            }
        }
        Some("no end without faults")
    }

    /// Whether an act belongs to a run without faults, and which goes first.
    fn rank(&self, act: Act, setup: &Setup) -> Option<Rank> {
        let rank = match act {
            Act::Answer(_) => Rank::Answer,
            Act::Arrive(i) if self.connections[i].is_open_at_client => Rank::Arrive,
            Act::ClientNotices(_) => Rank::ClientNotices,
            Act::Arrive(_) => Rank::Late,
            Act::GiveUp(i) if self.is_deposed(self.connections[i].server) => Rank::Late,
            Act::ServerNotices(_) => Rank::ServerNotices,
            Act::EndBlock(i) if self.awaits_events(self.connections[i].end, setup) => {
                Rank::EndBlock
            }
            Act::Unlock { .. } | Act::ContenderReleases(_) => Rank::Program,
            _ => return None,
        };
        Some(rank)
    }

    fn awaits_events(&self, End { client, node }: End, setup: &Setup) -> bool {
        self.clients[client].needs_events(node, setup)
    }

    /// A failover may have lost the RELEASE of a hold. Its lease ends it: that much is promised.
    fn release_inherited(&mut self, setup: &Setup) -> bool {
        let server = self.primary_mut();
        let inherited = server
            .locks
            .holds
            .iter()
            .find(|hold| server.is_inherited(hold))
            .cloned();
        if let Some(hold) = &inherited {
            server.end(hold, false, setup);
            self.settle();
        }
        inherited.is_some()
    }

    /// All is quiet, and a guard says held although its hold has ended: it will say so to its end.
    fn guard_was_not_told(&self, setup: &Setup) -> bool {
        let mut guards = self.clients.iter().flat_map(|client| &client.holds);
        guards.any(|held| {
            held.says_held(setup) && held.renewal != Renewal::Asked && !self.is_there(held)
        })
    }

    fn left_over(&self) -> Option<&'static str> {
        let server = self.primary();
        let mut calls = self.clients.iter().flat_map(|client| &client.calls);
        let is_listened_to = |node: usize, session: &Session| {
            let client = session.client.map(|client| &self.clients[client]);
            client.is_some_and(|client| session.connection == Some(client.links[node].epoch))
        };
        let is_listened_to = |(node, server): (usize, &Server)| {
            server
                .sessions
                .iter()
                .all(|session| is_listened_to(node, session))
        };
        let has_events = |server: &Server| {
            let mut sessions = server.sessions.iter();
            sessions.any(|session| !session.events.is_empty())
        };
        let mut nodes = self.servers.iter().enumerate();
        let left = [
            (
                calls.any(|call| call.phase != Phase::Undoing),
                "a call is never told",
            ),
            (
                self.clients
                    .iter()
                    .any(|c| !c.calls.is_empty() || !c.holds.is_empty()),
                "a release or an undo never ends",
            ),
            (
                !server.locks.waits.is_empty(),
                "a waiter is left in the queue",
            ),
            (
                !server.locks.holds.is_empty(),
                "a hold is left until its lease or session ends",
            ),
            (
                !nodes.all(is_listened_to),
                "a session is left to which no client listens",
            ),
            (
                self.servers.iter().any(has_events),
                "an event is left that is never acknowledged",
            ),
        ];
        left.into_iter()
            .find(|(is_left, _)| *is_left)
            .map(|(_, what)| what)
    }
}

/// In a run without faults, the order in which acts are carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Rank {
    Answer,
    Arrive,
    ClientNotices,
    /// A message on a connection that its client has given up.
    Late,
    ServerNotices,
    EndBlock,
    Program,
}
