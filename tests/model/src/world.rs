//! Everything at one moment: the servers, the clients, and the connections between them.

use crate::client::Client;
use crate::link::Binding;
use crate::message::{Reply, Up};
use crate::server::Server;
use crate::setup::{Budget, Setup};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Purpose {
    Session,
    Commands,
}

/// A connection. A side that has closed it, or has seen it closed, reads nothing more from it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Connection {
    pub(crate) client: usize,
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
    /// The primary, and behind it the deposed one for as long as a connection leads there.
    pub(crate) servers: Vec<Server>,
    pub(crate) clients: Vec<Client>,
    pub(crate) connections: Vec<Connection>,
    /// How often each thing may still happen.
    pub(crate) left: Budget,
    /// The number of the last call of `lock()`.
    pub(crate) calls: u8,
}

pub(crate) const PRIMARY: usize = 0;
pub(crate) const DEPOSED: usize = 1;

impl World {
    /// All clients are connected and bound, and nothing is under way.
    pub(crate) fn new(setup: &Setup) -> Self {
        let clients = setup.clients();
        let server = Server {
            bound: vec![None; clients.len()],
            ..Server::default()
        };
        let mut world = Self {
            servers: vec![server],
            clients: vec![Client::default(); clients.len()],
            connections: vec![],
            left: setup.budget.clone(),
            calls: 0,
        };
        for client in clients {
            world.open_session(client, setup);
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

    // The client's side.

    fn open(&mut self, client: usize, purpose: Purpose, number: u8) {
        self.connections.push(Connection {
            client,
            purpose,
            number,
            server: PRIMARY,
            up: vec![],
            down: vec![],
            is_open_at_client: true,
            is_open_at_server: true,
        });
    }

    fn open_session(&mut self, client: usize, setup: &Setup) {
        let link = &mut self.clients[client].link;
        link.epoch += 1;
        let number = link.epoch;
        self.open(client, Purpose::Session, number);
        self.ask_events(client, true, setup);
    }

    fn ask_events(&mut self, client: usize, at_once: bool, setup: &Setup) {
        let link = &mut self.clients[client].link;
        (link.asked_grace, link.asked_lease) = (setup.size.grace, setup.size.lease);
        let (epoch, after) = (link.epoch, (link.life, link.seq));
        self.send(
            client,
            Purpose::Session,
            epoch,
            Up::Events {
                epoch,
                after,
                at_once,
            },
        );
    }

    fn open_commands(&mut self, client: usize, setup: &Setup) {
        let link = &mut self.clients[client].link;
        link.number += 1;
        link.binding = Binding::Asked;
        let number = link.number;
        self.clients[client].send_again(setup);
        self.open(client, Purpose::Commands, number);
        self.send(client, Purpose::Commands, number, Up::Bind(number));
        self.flush(client, setup);
    }

    fn send(&mut self, client: usize, purpose: Purpose, number: u8, up: Up) {
        let is_it =
            |c: &&mut Connection| (c.client, c.purpose, c.number) == (client, purpose, number);
        if let Some(connection) = self.connections.iter_mut().find(is_it)
            && connection.is_open_at_server
        {
            connection.up.push(up);
        }
    }

    /// Sends the commands that were not sent yet, if the connection may be used.
    pub(crate) fn flush(&mut self, client: usize, setup: &Setup) {
        loop {
            let link = &self.clients[client].link;
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
            self.clients[client].note_sending(index, setup);
            self.clients[client].link.sent += 1;
            self.send(client, Purpose::Commands, number, Up::Request(request));
        }
    }

    /// The client has no more use for this connection. It opens another one, unless BIND may have
    /// been refused: then only after the next EVENTS reply.
    pub(crate) fn close_at_client(&mut self, i: usize, setup: &Setup) {
        let connection = &mut self.connections[i];
        connection.is_open_at_client = false;
        connection.down.clear();
        let (client, was_closed) = (connection.client, !connection.is_open_at_server);
        let link = &mut self.clients[client].link;
        if self.connections[i].purpose == Purpose::Session {
            self.open_session(client, setup);
        } else if was_closed && link.binding == Binding::Asked {
            link.binding = Binding::Closed;
        } else {
            self.open_commands(client, setup);
        }
    }

    /// The client gives its command connection up, and opens another after the next EVENTS reply.
    fn leave_commands(&mut self, client: usize) {
        let link = &mut self.clients[client].link;
        link.binding = Binding::Closed;
        let it = (client, Purpose::Commands, link.number);
        for c in &mut self.connections {
            if (c.client, c.purpose, c.number) == it {
                c.is_open_at_client = false;
                c.down.clear();
            }
        }
    }

    /// The next message of a connection reaches the client.
    pub(crate) fn answer(&mut self, i: usize, setup: &Setup) {
        let reply = self.connections[i].down.remove(0);
        let client = self.connections[i].client;
        let link = &mut self.clients[client].link;
        match reply {
            Reply::Events { life, events } => self.hear(client, life, events, setup),
            Reply::Bound { life } if life == link.life || !setup.rules.bind_life => {
                (link.binding, link.bound_life) = (Binding::Bound, life);
            }
            Reply::Bound { .. } => self.leave_commands(client),
            Reply::NoSession | Reply::Stale if link.binding == Binding::Asked => {
                self.leave_commands(client); // the answer to BIND
            }
            reply => self.clients[client].hear_reply(&reply, setup),
        }
        self.flush(client, setup);
    }

    fn hear(&mut self, client: usize, life: u8, events: Vec<crate::message::Event>, setup: &Setup) {
        self.clients[client].hear(life, events, setup);
        self.ask_events(client, false, setup);
        let link = &self.clients[client].link;
        let is_elsewhere = link.binding == Binding::Bound && link.bound_life != life;
        if is_elsewhere && setup.rules.bind_life {
            self.leave_commands(client);
        }
        if self.clients[client].link.binding == Binding::Closed {
            self.open_commands(client, setup);
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
        let (client, number, at) = (connection.client, connection.number, connection.server);
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
                    self.stop_reading((client, Purpose::Commands, before));
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
    fn stop_reading(&mut self, it: (usize, Purpose, u8)) {
        for c in &mut self.connections {
            if (c.client, c.purpose, c.number) == it {
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
        let (client, number, at) = (connection.client, connection.number, connection.server);
        match connection.purpose {
            Purpose::Session => self.servers[at].session_connection_closed(client, number, setup),
            Purpose::Commands => self.servers[at].command_connection_closed(client, number),
        }
    }

    /// The time of an EVENTS call that blocks is up.
    pub(crate) fn end_block(&mut self, i: usize) {
        let Connection { client, server, .. } = self.connections[i];
        if let Some(reply) = self.servers[server].answer_events(client) {
            self.reply(i, reply);
        }
    }

    pub(crate) fn restart(&mut self, keeps_holds: bool) {
        self.servers[PRIMARY].restart(keeps_holds);
        for c in &mut self.connections {
            c.is_open_at_server = false;
            c.up.clear();
        }
    }

    pub(crate) fn fail_over(&mut self, keeps_holds: bool) {
        let new = self.servers[PRIMARY].promoted(keeps_holds);
        self.servers.insert(PRIMARY, new);
        self.connections.iter_mut().for_each(|c| c.server = DEPOSED);
    }

    /// Whether the server waits on this connection for something to tell.
    pub(crate) fn blocks(&self, connection: &Connection) -> bool {
        let sessions = &self.servers[connection.server].sessions;
        connection.purpose == Purpose::Session
            && sessions.iter().any(|session| {
                let its = (session.client, session.connection);
                session.is_asking && its == (Some(connection.client), Some(connection.number))
            })
    }

    /// A blocked EVENTS call is told its events at once. Connections that matter to nobody any more
    /// are forgotten, and so is a deposed server to which none leads.
    pub(crate) fn settle(&mut self) {
        for i in 0..self.connections.len() {
            let Connection { client, server, .. } = self.connections[i];
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
                    (session.client, session.connection) == (Some(c.client), Some(c.number))
                }),
                Purpose::Commands => server.bound[c.client] == Some(c.number),
            };
            c.is_open_at_client || c.is_open_at_server && (is_known || !c.up.is_empty())
        });
        if self.connections.iter().all(|c| c.server != DEPOSED) {
            self.servers.truncate(DEPOSED);
        }
        self.connections
            .sort_by_key(|c| (c.client, c.purpose, c.number));
    }
}
