//! The task that calls RLOCK.EVENTS again and again, on a connection of its own.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use crate::error::Error;
use crate::wire::reply::{read_by, read_told};
use crate::wire::session::part_of_grace;
use crate::wire::{
    Answered, Connection, Connector, Listener, News, Replies, Session, Told, request,
};
use crate::{Backoff, Pace, part};

/// The task that listens. It does not keep the client alive.
struct Listening {
    session: Arc<Session>,
    connector: Connector,
    listener: Weak<dyn Listener>,
    pace: Pace,
    /// The number of the present connection.
    epoch: u64,
    /// The last life and event.
    life: i64,
    seq: u64,
    /// When the last call was sent that was answered in this life, with all that there was to tell.
    told: Option<Instant>,
    /// Whether the last answer was late: the next call then confirms the session at once.
    was_late: bool,
    /// How late the answers come. Without this, a long round trip would make each of them overdue.
    late: Duration,
}

/// A connection that is asked, and since when.
struct Asked {
    connection: Connection,
    sent: Instant,
    replies: Replies,
}

/// Listens until it is aborted, with the node. If another connection takes the session over, it is
/// taken back: with pauses, so two clients with one session name cannot flood the server.
pub(crate) async fn run(connector: Connector, session: Arc<Session>, listener: Weak<dyn Listener>) {
    let mut listening = Listening {
        session,
        connector,
        listener,
        pace: Pace::default(),
        epoch: 0,
        life: 0,
        seq: 0,
        told: None,
        was_late: false,
        late: Duration::ZERO,
    };
    let mut connection = listening.attach(None).await;
    loop {
        let overdue = listening.listen(connection).await;
        connection = listening.attach(overdue).await;
    }
}

impl Listening {
    /// Calls until a call fails; or is overdue, and may be answered yet.
    async fn listen(&mut self, mut connection: Connection) -> Option<Asked> {
        let longest = wait_in(self.session.grace);
        let (mut at_once, mut was_late) = (false, std::mem::take(&mut self.was_late));
        let mut pauses = Backoff::new();
        loop {
            // At once after a silence that was too long, and when an answer was late, which says
            // nothing of the time since it was asked for: before the next another silence would
            // come on top of that. But not again and again.
            let is_over = || {
                let present = self.session.present();
                present.is_none_or(|present| present.is_over(Instant::now()))
            };
            at_once = !at_once && (was_late || is_over());
            let wait = Some(longest).filter(|_| !at_once);
            let mut asked = self.ask(connection, wait);
            let within = longest.saturating_add(self.slack());
            let mut state = self.session.state.subscribe();
            let doubts = state.borrow().doubts;
            let answer = tokio::select! {
                answer = timeout(within, &mut asked.replies) => answer,
                // Another server is the one to use.
                _ = state.wait_for(|state| state.doubts > doubts) => return None,
                () = asked.connection.over() => {
                    self.broken(Error::elsewhere());
                    return None;
                }
            };
            let Ok(answer) = answer else {
                self.broken(Error::no_reply(None));
                return Some(asked);
            };
            if let Some(late) = asked.sent.elapsed().checked_sub(wait.unwrap_or_default()) {
                was_late = late >= part_of_grace(self.session.grace, 8);
                // The lateness decays: one silence says little about later answers.
                self.late = late.max(part(self.late, 8).saturating_mul(7));
            }
            if !self.answered(asked.sent, answer) {
                return None;
            }
            if !self.session.is_verified(self.life) {
                let longest = part_of_grace(self.session.grace, 8);
                sleep(pauses.next_up_to(longest)).await;
            }
            connection = asked.connection;
        }
    }

    /// Until BIND has confirmed the server, this acknowledges no event: the events may be for
    /// another node of this client. The server answers such a call at once.
    fn ask(&self, connection: Connection, wait: Option<Duration>) -> Asked {
        let is_verified = self.session.is_verified(self.life);
        let after = if is_verified {
            (self.life, self.seq)
        } else {
            (0, 0)
        };
        let name = &self.session.name;
        let call = request::events(name, self.epoch, after, wait, self.session.grace);
        let sent = Instant::now();
        let replies = connection.ask_one(call);
        Asked {
            connection,
            sent,
            replies,
        }
    }

    /// A call was answered, maybe late: whether the session is there.
    fn answered(&mut self, sent: Instant, replies: Answered) -> bool {
        let told = replies.and_then(|replies| {
            let reply = replies.into_iter().next();
            read_by(reply.ok_or_else(|| Error::no_reply(None)), read_told)
        });
        match told {
            Ok(told) => {
                self.hear(sent, told);
                true
            }
            Err(error) => {
                self.broken(error);
                false
            }
        }
    }

    /// The order matters: first the session's new state, which commands sent from now on count on;
    /// then the events; then the consequences of another life.
    fn hear(&mut self, sent: Instant, told: Told) {
        let Told {
            life,
            mut events,
            is_all,
        } = told;
        let is_new = life != self.life;
        if is_new {
            (self.life, self.seq, self.told) = (life, 0, None);
        }
        self.session.confirm(life, sent);
        // Told again after a reply that was lost, or by the connection before as well.
        events.retain(|event| event.seq > self.seq);
        self.seq = events.last().map_or(self.seq, |last| last.seq);
        let since = self.told;
        if is_all {
            self.told = Some(sent);
        }
        if let Some(client) = self.listener.upgrade() {
            client.heard(
                &self.session,
                News {
                    life,
                    is_new,
                    events,
                    since,
                },
            );
        }
    }

    /// Connects and calls until a call is answered. An `overdue` call on the former connection may
    /// still be answered meanwhile, if the server only stood still. The former connection stays
    /// open until the new one is answered: closing it earlier would cost our waiters their places.
    async fn attach(&mut self, mut overdue: Option<Asked>) -> Connection {
        loop {
            if self.session.is_retired() {
                // Until it is aborted: another listens in its place.
                std::future::pending::<()>().await;
            }
            let connection = match &mut overdue {
                None => self.open().await,
                Some(asked) => tokio::select! {
                    biased;
                    answer = &mut asked.replies => {
                        let old = overdue.take();
                        let old = old.filter(|old| self.answered(old.sent, answer));
                        match old {
                            Some(old) => {
                                self.was_late = true;
                                return old.connection;
                            }
                            None => continue,
                        }
                    }
                    connection = self.open() => connection,
                },
            };
            if let Some(attached) = self.attach_on(connection, overdue.take()).await {
                return attached;
            }
        }
    }

    /// The first call on a connection is answered at once, and so confirms at once.
    async fn attach_on(
        &mut self,
        connection: Connection,
        mut old: Option<Asked>,
    ) -> Option<Connection> {
        self.epoch = self.session.next_epoch();
        let asked = self.ask(connection, None);
        let mut answer = Box::pin(timeout(
            self.connector.dialer.response_timeout,
            asked.replies,
        ));
        while let Some(before) = &mut old {
            tokio::select! {
                biased;
                late = &mut before.replies => {
                    if late.is_ok() {
                        self.answered(before.sent, late);
                    }
                    old = None;
                }
                answer = &mut answer => {
                    let answer = answer.unwrap_or_else(|_| Err(Error::no_reply(None)));
                    return self.answered(asked.sent, answer).then_some(asked.connection);
                }
            }
        }
        let answer = answer.await.unwrap_or_else(|_| Err(Error::no_reply(None)));
        self.answered(asked.sent, answer)
            .then_some(asked.connection)
    }

    /// Connects until it succeeds, with pauses between the tries. Within the grace they are short
    /// enough to keep the guards. Afterwards they grow, whatever the grace is.
    async fn open(&mut self) -> Connection {
        loop {
            let grace = self.session.grace;
            let in_grace = self.told.is_some_and(|told| told.elapsed() < grace);
            let longest = in_grace.then(|| part_of_grace(grace, 4));
            self.pace.keep(longest.unwrap_or(Duration::MAX)).await;
            match self.connector.open().await {
                Ok(connection) => return connection,
                Err(error) => self.broken(error),
            }
        }
    }

    fn broken(&self, error: Error) {
        self.session.broken(error);
        if let Some(client) = self.listener.upgrade() {
            client.broken(&self.session);
        }
    }

    /// How long after its time an answer is overdue: later than answers usually come. With a grace
    /// there must be time left to connect anew.
    fn slack(&self) -> Duration {
        let grace = |of| part_of_grace(self.session.grace, of);
        let usual = self.late.saturating_mul(2).min(grace(2));
        grace(4)
            .max(usual)
            .min(self.connector.dialer.response_timeout)
    }
}

/// A runtime that ends takes this along.
impl Drop for Listening {
    fn drop(&mut self) {
        self.session.broken(Error::shut_down());
    }
}

/// How long the server holds a call before it answers that nothing has happened.
///
/// An answer confirms the moment in which its call was sent. So when a silence begins just before
/// an answer, the last confirmed moment is twice this ago by its end, and a silence of nine tenths
/// of the grace, less 100 ms, must fit into the rest: the contract asks for a third at most, and a
/// guard needs this.
fn wait_in(grace: Duration) -> Duration {
    let wait = part_of_grace(grace, 33).saturating_add(WAIT_ON_TOP);
    wait.min(part_of_grace(grace, 3)).min(LONGEST_WAIT)
}

const WAIT_ON_TOP: Duration = Duration::from_millis(25);

/// The session connection is tried at least this often, whatever the grace.
const LONGEST_WAIT: Duration = Duration::from_secs(2);
