//! The steps: which may come next, and how each changes the world.

use crate::client::{Client, Guard, Phase, Renewal};
use crate::message::{CONTENDER, Command, Kind, Names, Reply, Subject, Up};
use crate::setup::Setup;
use crate::world::{Connection, End, World};

/// One step. Connections, calls and holds are named by their place in the state before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Act {
    /// The next message of a connection reaches the server.
    Arrive(usize),
    /// The next message of a connection is an ACQUIRE that the server answers with an error.
    Refuse(usize),
    /// The next message of a connection reaches the client.
    Answer(usize),
    /// The server notices that the client has closed it. Messages still under way to it are gone.
    ServerNotices(usize),
    /// The client notices that the server has closed it.
    ClientNotices(usize),
    /// The client gives it up. Commands under way may still be carried out.
    GiveUp(usize),
    /// The server loses it. Replies under way may still be heard.
    Cut(usize),
    /// The time of an EVENTS call that blocks is up.
    EndBlock(usize),
    Lock {
        client: usize,
        subject: Subject,
    },
    Drop {
        client: usize,
        call: usize,
    },
    Unlock {
        client: usize,
        hold: usize,
    },
    Renew {
        client: usize,
        hold: usize,
    },
    Tick,
    Break(u8),
    Restart {
        keeps_holds: bool,
    },
    FailOver {
        keeps_holds: bool,
    },
    Timeout(usize),
    Overflow(usize),
    MoveSlot,
    ContenderTakes(u8),
    ContenderReleases(u8),
}

impl World {
    pub(crate) fn act(&mut self, act: Act, setup: &Setup) {
        match act {
            Act::Arrive(i) => self.arrive(i, setup),
            Act::Refuse(i) => {
                self.left.errors -= 1;
                self.connections[i].up.remove(0);
                self.reply(i, Reply::Refused);
            }
            Act::Answer(i) => self.answer(i, setup),
            Act::ServerNotices(i) => self.close_at_server(i, setup),
            Act::ClientNotices(i) => self.close_at_client(i, setup),
            Act::GiveUp(i) => {
                self.left.cuts -= u8::from(!self.is_deposed(self.connections[i].server));
                self.close_at_client(i, setup);
            }
            Act::Cut(i) => {
                self.left.cuts -= 1;
                self.close_at_server(i, setup);
            }
            Act::EndBlock(i) => self.end_block(i),
            Act::Lock { .. } | Act::Drop { .. } | Act::Unlock { .. } | Act::Renew { .. } => {
                self.act_of_program(act, setup);
            }
            _ => self.act_of_server(act, setup),
        }
        self.settle();
    }

    fn act_of_program(&mut self, act: Act, setup: &Setup) {
        let (Act::Lock { client, .. }
        | Act::Drop { client, .. }
        | Act::Unlock { client, .. }
        | Act::Renew { client, .. }) = act
        else {
            return;
        };
        let program = &mut self.clients[client];
        match act {
            Act::Lock { subject, .. } => {
                self.left.calls -= 1;
                self.calls += 1;
                program.lock(subject, self.calls, setup);
            }
            Act::Drop { call, .. } => {
                self.left.drops -= 1;
                program.drop_call(call, setup);
            }
            Act::Unlock { hold, .. } => program.unlock(hold, setup),
            Act::Renew { hold, .. } => {
                self.left.renews -= 1;
                program.renew(hold, setup);
            }
            _ => {}
        }
        for node in 0..self.clients[client].links.len() {
            self.flush(End { client, node }, setup);
        }
    }

    fn act_of_server(&mut self, act: Act, setup: &Setup) {
        let server = &mut self.servers[self.home];
        match act {
            Act::Tick => {
                self.left.ticks -= 1;
                self.clients.iter_mut().for_each(Client::tick);
                self.servers
                    .iter_mut()
                    .for_each(|server| server.tick(setup));
            }
            Act::Break(name) => {
                self.left.breaks -= 1;
                server.break_lock(name, setup);
            }
            Act::MoveSlot => {
                self.left.moves -= 1;
                self.move_slot(setup);
            }
            Act::Restart { keeps_holds } => {
                self.left.restarts -= 1;
                self.restart(keeps_holds);
            }
            Act::FailOver { keeps_holds } => {
                self.left.failovers -= 1;
                self.fail_over(keeps_holds);
            }
            Act::Timeout(wait) => {
                self.left.timeouts -= 1;
                server.leave(wait, Kind::Timeout, setup);
            }
            Act::Overflow(client) => {
                self.left.overflows -= 1;
                server.overflow(client, setup);
            }
            Act::ContenderTakes(name) => {
                self.left.plain -= 1;
                server.locks.contend(name, setup);
            }
            Act::ContenderReleases(name) => {
                if let Some(hold) = server.locks.hold(setup.contender(name)).cloned() {
                    server.end(&hold, false, setup);
                }
            }
            _ => {}
        }
    }

    /// Everything that may happen next.
    pub(crate) fn acts(&self, setup: &Setup) -> Vec<Act> {
        let mut acts = vec![];
        for (i, connection) in self.connections.iter().enumerate() {
            self.acts_of_connection(i, connection, setup, &mut acts);
        }
        for client in setup.clients() {
            self.acts_of_client(client, setup, &mut acts);
        }
        self.acts_of_server(setup, &mut acts);
        acts
    }

    fn acts_of_connection(&self, i: usize, c: &Connection, setup: &Setup, acts: &mut Vec<Act>) {
        let may_fail = self.left.cuts > 0 && c.end.client < setup.size.faulty.into();
        let is_deposed = self.is_deposed(c.server);
        match (c.is_open_at_client, c.is_open_at_server) {
            (true, true) if may_fail => acts.extend([Act::GiveUp(i), Act::Cut(i)]),
            (true, true) if is_deposed => acts.push(Act::GiveUp(i)),
            (true, false) => acts.push(Act::ClientNotices(i)),
            (false, true) => acts.push(Act::ServerNotices(i)),
            _ => {}
        }
        if c.is_open_at_server && !c.up.is_empty() {
            acts.push(Act::Arrive(i));
        }
        let is_acquire = |up: &Up| matches!(up, Up::Request(r) if r.command == Command::Acquire);
        if c.is_open_at_server && self.left.errors > 0 && c.up.first().is_some_and(is_acquire) {
            acts.push(Act::Refuse(i));
        }
        if c.is_open_at_client && !c.down.is_empty() {
            acts.push(Act::Answer(i));
        }
        let client = &self.clients[c.end.client];
        let is_old = client.links[c.end.node].confirmed < setup.size.grace;
        let matters = is_old || client.needs_events(c.end.node, setup);
        if c.is_open_at_client && self.blocks(c) && matters {
            acts.push(Act::EndBlock(i));
        }
    }

    fn acts_of_client(&self, client: usize, setup: &Setup, acts: &mut Vec<Act>) {
        let program = &self.clients[client];
        if self.left.calls > 0 {
            let free = setup
                .subjects(client)
                .into_iter()
                .filter(|subject| !program.is_busy(*subject, setup));
            acts.extend(free.map(|subject| Act::Lock { client, subject }));
        }
        if self.left.drops > 0 {
            let calls = program.calls.iter().enumerate();
            let calls = calls.filter(|(_, call)| call.phase != Phase::Undoing);
            acts.extend(calls.map(|(call, _)| Act::Drop { client, call }));
        }
        for (hold, held) in program.holds.iter().enumerate() {
            if held.guard == Guard::Gone || held.renewal == Renewal::Asked {
                continue;
            }
            if program.guards(held, setup) > 0 {
                acts.push(Act::Unlock { client, hold });
            }
            if self.left.renews > 0 && held.says_held(setup) {
                acts.push(Act::Renew { client, hold });
            }
        }
    }

    fn acts_of_server(&self, setup: &Setup, acts: &mut Vec<Act>) {
        let (left, server) = (&self.left, self.primary());
        if left.ticks > 0 {
            acts.push(Act::Tick);
        }
        if left.moves > 0 && setup.size.nodes == 2 {
            acts.push(Act::MoveSlot);
        }
        for keeps_holds in [true, false] {
            if left.restarts > 0 {
                acts.push(Act::Restart { keeps_holds });
            }
            if left.failovers > 0 && setup.size.nodes == 1 {
                acts.push(Act::FailOver { keeps_holds });
            }
        }
        let locks = &server.locks;
        for name in 0..setup.size.names {
            let holds = locks.hold(setup.contender(name)).is_some();
            let waits = locks
                .waits
                .iter()
                .any(|wait| wait.subject == setup.contender(name));
            if holds {
                acts.push(Act::ContenderReleases(name));
            } else if left.plain > 0 && !waits {
                acts.push(Act::ContenderTakes(name));
            }
            if left.breaks > 0
                && locks
                    .holds
                    .iter()
                    .any(|hold| hold.subject.names == Names::one(name))
            {
                acts.push(Act::Break(name));
            }
        }
        if left.timeouts > 0 {
            let waits =
                (0..locks.waits.len()).filter(|i| locks.waits[*i].subject.owner != CONTENDER);
            acts.extend(waits.map(Act::Timeout));
        }
        if left.overflows > 0 {
            let sessions = server.sessions.iter().filter(|session| !session.is_asking);
            acts.extend(
                sessions
                    .filter_map(|session| session.client)
                    .map(Act::Overflow),
            );
        }
    }
}
