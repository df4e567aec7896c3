//! Everything at one moment: the servers, the clients, and the connections between them.

use std::mem;

use crate::client::Client;
use crate::link::{Binding, Link};
use crate::message::{Reply, Up};
use crate::server::Server;
use crate::setup::{Budget, Setup};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Purpose {
    Session,
    Commands,
}

/// A client's link to a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct End {
    pub(crate) client: usize,
    pub(crate) node: usize,
}

/// A connection. A side that has closed it, or has seen it closed, reads nothing more from it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Connection {
    pub(crate) end: End,
    pub(crate) purpose: Purpose,
    pub(crate) number: u8,
    /// The server that it leads to.
    pub(crate) server: usize,
    pub(crate) up: Vec<Up>,
    pub(crate) down: Vec<Reply>,
    pub(crate) is_open_at_client: bool,
    pub(crate) is_open_at_server: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct World {
    /// One a node, and behind them the deposed one for as long as a connection leads there.
    pub(crate) servers: Vec<Server>,
    /// The node that has the slot of the locks.
    pub(crate) home: usize,
    pub(crate) clients: Vec<Client>,
    pub(crate) connections: Vec<Connection>,
    /// How often each thing may still happen.
    pub(crate) left: Budget,
    /// The number of the last call of `lock()`.
    pub(crate) calls: u8,
}

impl World {
    /// All clients are connected and bound, and nothing is under way.
    pub(crate) fn new(setup: &Setup) -> Self {
        let clients = setup.clients();
        let nodes = usize::from(setup.size.nodes);
        let server = |node| Server {
            bound: vec![None; clients.len()],
            has_moved: node != 0,
            ..Server::default()
        };
        let client = Client {
            links: vec![Link::default(); nodes],
            ..Client::default()
        };
        let mut world = Self {
            servers: (0..nodes).map(server).collect(),
            home: 0,
            clients: vec![client; clients.len()],
            connections: vec![],
            left: setup.budget.clone(),
            calls: 0,
        };
        for client in clients {
            (0..nodes).for_each(|node| world.open_session(End { client, node }, setup));
        }
        world.run_dry(setup);
        world
    }

    /// Delivers all that is under way.
    fn run_dry(&mut self, setup: &Setup) {
        let is_under_way = |c: &Connection| !c.up.is_empty() || !c.down.is_empty();
        while let Some(i) = self.connections.iter().position(is_under_way) {
            if self.connections[i].down.is_empty() {
                self.arrive(i, setup);
            } else {
                self.answer(i, setup);
            }
            self.settle();
        }
    }

    /// The server that has the locks.
    pub(crate) fn primary(&self) -> &Server {
        &self.servers[self.home]
    }

    pub(crate) fn primary_mut(&mut self) -> &mut Server {
        &mut self.servers[self.home]
    }

    /// Of a connection: it leads to the deposed server.
    pub(crate) fn is_deposed(&self, server: usize) -> bool {
        server >= self.clients[0].links.len()
    }

    fn link(&mut self, End { client, node }: End) -> &mut Link {
        &mut self.clients[client].links[node]
    }

    // The client's side.

    fn open(&mut self, end: End, purpose: Purpose, number: u8) {
        self.connections.push(Connection {
            end,
            purpose,
            number,
            server: end.node,
            up: vec![],
            down: vec![],
            is_open_at_client: true,
            is_open_at_server: true,
        });
    }

    fn open_session(&mut self, end: End, setup: &Setup) {
        let link = self.link(end);
        link.epoch += 1;
        let number = link.epoch;
        self.open(end, Purpose::Session, number);
        self.ask_events(end, true, setup);
    }

    fn ask_events(&mut self, end: End, at_once: bool, setup: &Setup) {
        let link = self.link(end);
        (link.asked_grace, link.asked_lease) = (setup.size.grace, setup.size.lease);
        let (epoch, after) = (link.epoch, (link.life, link.seq));
        self.send(
            end,
            Purpose::Session,
            epoch,
            Up::Events {
                epoch,
                after,
                at_once,
            },
        );
    }

    fn open_commands(&mut self, end: End, setup: &Setup) {
        let link = self.link(end);
        link.number += 1;
        link.binding = Binding::Asked;
        let number = link.number;
        self.clients[end.client].send_again(end.node, setup);
        self.open(end, Purpose::Commands, number);
        self.send(end, Purpose::Commands, number, Up::Bind(number));
        self.flush(end, setup);
    }

    fn send(&mut self, end: End, purpose: Purpose, number: u8, up: Up) {
        let is_it = |c: &&mut Connection| (c.end, c.purpose, c.number) == (end, purpose, number);
        if let Some(connection) = self.connections.iter_mut().find(is_it)
            && connection.is_open_at_server
        {
            connection.up.push(up);
        }
    }

    /// Sends the commands that were not sent yet, if the connection may be used.
    pub(crate) fn flush(&mut self, end: End, setup: &Setup) {
        loop {
            let link = self.link(end);
            let may_send = match link.binding {
                Binding::Bound => true,
                Binding::Asked => !setup.rules.bind_waits,
                Binding::Closed => false,
            };
            let next = link.pending.get(link.sent).filter(|_| may_send);
            let Some(request) = next.map(|pending| pending.request.clone()) else {
                return;
            };
            let (number, index) = (link.number, link.sent);
            self.clients[end.client].note_sending(end.node, index, setup);
            self.link(end).sent += 1;
            self.send(end, Purpose::Commands, number, Up::Request(request));
        }
    }

    /// The client has no more use for this connection. It opens another one, unless BIND may have
    /// been refused: then only after the next EVENTS reply.
    pub(crate) fn close_at_client(&mut self, i: usize, setup: &Setup) {
        let connection = &mut self.connections[i];
        connection.is_open_at_client = false;
        connection.down.clear();
        let (end, was_closed) = (connection.end, !connection.is_open_at_server);
        if self.connections[i].purpose == Purpose::Session {
            self.open_session(end, setup);
        } else if was_closed && self.link(end).binding == Binding::Asked {
            self.link(end).binding = Binding::Closed;
        } else {
            self.open_commands(end, setup);
        }
    }

    /// The client gives its command connection up, and opens another after the next EVENTS reply.
    fn leave_commands(&mut self, end: End) {
        let link = self.link(end);
        link.binding = Binding::Closed;
        let it = (end, Purpose::Commands, link.number);
        for c in &mut self.connections {
            if (c.end, c.purpose, c.number) == it {
                c.is_open_at_client = false;
                c.down.clear();
            }
        }
    }

    /// The next message of a connection reaches the client.
    pub(crate) fn answer(&mut self, i: usize, setup: &Setup) {
        let reply = self.connections[i].down.remove(0);
        let end = self.connections[i].end;
        let link = self.link(end);
        match reply {
            Reply::Events { life, events } => self.hear(end, life, events, setup),
            Reply::Bound { life } if life == link.life || !setup.rules.bind_life => {
                (link.binding, link.bound_life) = (Binding::Bound, life);
            }
            Reply::Bound { .. } => self.leave_commands(end),
            Reply::NoSession | Reply::Stale if link.binding == Binding::Asked => {
                self.leave_commands(end); // the answer to BIND
            }
            reply => self.clients[end.client].hear_reply(end.node, &reply, setup),
        }
        // A command that was answered MOVED goes out on the other link.
        for node in 0..self.clients[end.client].links.len() {
            self.flush(End { node, ..end }, setup);
        }
    }

    fn hear(&mut self, end: End, life: u8, events: Vec<crate::message::Event>, setup: &Setup) {
        self.clients[end.client].hear(end.node, life, events, setup);
        self.ask_events(end, false, setup);
        let link = self.link(end);
        let is_elsewhere = link.binding == Binding::Bound && link.bound_life != life;
        if is_elsewhere && setup.rules.bind_life {
            self.leave_commands(end);
        }
        if self.link(end).binding == Binding::Closed {
            self.open_commands(end, setup);
        }
    }

    // The server's side.

    pub(crate) fn reply(&mut self, i: usize, reply: Reply) {
        if self.connections[i].is_open_at_client {
            self.connections[i].down.push(reply);
        }
    }

    /// The next message of a connection reaches the server.
    pub(crate) fn arrive(&mut self, i: usize, setup: &Setup) {
        let connection = &mut self.connections[i];
        let up = connection.up.remove(0);
        let (end, number, at) = (connection.end, connection.number, connection.server);
        let client = end.client;
        let server = &mut self.servers[at];
        match up {
            Up::Events {
                epoch,
                after,
                at_once,
            } => {
                if let Some(reply) = server.events(client, number, epoch, after, at_once, setup) {
                    self.reply(i, reply);
                }
            }
            Up::Bind(number) => {
                let (reply, before) = server.bind(client, number);
                if let Some(before) = before.filter(|_| setup.rules.bind_closes) {
                    self.stop_reading((end, Purpose::Commands, before));
                }
                self.reply(i, reply);
            }
            Up::Request(request) => {
                let reply = server.request(client, number, &request, setup);
                self.reply(i, reply);
            }
        }
    }

    /// The server carries out nothing more of this connection.
    fn stop_reading(&mut self, it: (End, Purpose, u8)) {
        for c in &mut self.connections {
            if (c.end, c.purpose, c.number) == it {
                c.is_open_at_server = false;
                c.up.clear();
            }
        }
    }

    /// The server loses this connection, or notices that the client has closed it.
    pub(crate) fn close_at_server(&mut self, i: usize, setup: &Setup) {
        let connection = &mut self.connections[i];
        connection.is_open_at_server = false;
        connection.up.clear();
        let (end, number, at) = (connection.end, connection.number, connection.server);
        let client = end.client;
        match connection.purpose {
            Purpose::Session => self.servers[at].session_connection_closed(client, number, setup),
            Purpose::Commands => self.servers[at].command_connection_closed(client, number),
        }
    }

    /// The time of an EVENTS call that blocks is up.
    pub(crate) fn end_block(&mut self, i: usize) {
        let Connection {
            end: End { client, .. },
            server,
            ..
        } = self.connections[i];
        if let Some(reply) = self.servers[server].answer_events(client) {
            self.reply(i, reply);
        }
    }

    pub(crate) fn restart(&mut self, keeps_holds: bool) {
        self.primary_mut().restart(keeps_holds);
        let home = self.home;
        for c in self.connections.iter_mut().filter(|c| c.server == home) {
            c.is_open_at_server = false;
            c.up.clear();
        }
    }

    pub(crate) fn fail_over(&mut self, keeps_holds: bool) {
        let new = self.primary().promoted(keeps_holds);
        let deposed = mem::replace(self.primary_mut(), new);
        let (home, at) = (self.home, self.servers.len());
        self.servers.push(deposed);
        let its = self.connections.iter_mut().filter(|c| c.server == home);
        its.for_each(|c| c.server = at);
    }

    /// The slot of the locks goes to the other node.
    pub(crate) fn move_slot(&mut self, setup: &Setup) {
        let holds = self.primary_mut().move_away(setup);
        self.home = self.servers.len() - 1 - self.home;
        let server = self.primary_mut();
        (server.has_moved, server.locks.holds) = (false, holds);
    }

    /// Whether the server waits on this connection for something to tell.
    pub(crate) fn blocks(&self, connection: &Connection) -> bool {
        let sessions = &self.servers[connection.server].sessions;
        connection.purpose == Purpose::Session
            && sessions.iter().any(|session| {
                let its = (session.client, session.connection);
                session.is_asking && its == (Some(connection.end.client), Some(connection.number))
            })
    }

    /// A blocked EVENTS call is told its events at once. Connections that matter to nobody any more
    /// are forgotten, and so is a deposed server to which none leads.
    pub(crate) fn settle(&mut self) {
        for i in 0..self.connections.len() {
            let Connection {
                end: End { client, .. },
                server,
                ..
            } = self.connections[i];
            let has_events = |world: &mut Self| {
                let session = world.servers[server].session(client);
                session.is_some_and(|session| !session.events.is_empty())
            };
            if self.blocks(&self.connections[i]) && has_events(self) {
                self.end_block(i);
            }
        }
        let servers = &self.servers;
        self.connections.retain(|c| {
            let server = &servers[c.server];
            let is_known = match c.purpose {
                Purpose::Session => server.sessions.iter().any(|session| {
                    (session.client, session.connection) == (Some(c.end.client), Some(c.number))
                }),
                Purpose::Commands => server.bound[c.end.client] == Some(c.number),
            };
            c.is_open_at_client || c.is_open_at_server && (is_known || !c.up.is_empty())
        });
        if self.connections.iter().all(|c| !self.is_deposed(c.server)) {
            self.servers.truncate(self.clients[0].links.len());
        }
        self.connections
            .sort_by_key(|c| (c.end, c.purpose, c.number));
    }
}
