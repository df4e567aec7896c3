//! The task that keeps the session attached: RLOCK.EVENTS, again and again, on a connection of its
//! own.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{Instant, sleep};

use crate::backoff::Backoff;
use crate::command::{self, Event};
use crate::connection::{Connector, EventsConnection};
use crate::error::Error;
use crate::hold::{Hold, LostReason};
use crate::node::Node;
use crate::nodes::Nodes;
use crate::part;
use crate::registry::{self, Delivered};
use crate::renewal;
use crate::session::{Attachment, Session};

/// What the task works with. It does not keep the client alive.
pub(crate) struct Lifeline {
    session: Arc<Session>,
    connector: Connector,
    nodes: Weak<Nodes>,
    node: Weak<Node>,
    /// When the last call that was answered had been sent. What has not been told in its answer
    /// has not happened before.
    answered: Instant,
    /// When a call was last given up without an answer.
    given_up: Option<Instant>,
    /// The pauses before going elsewhere: should both connections follow each other to and fro,
    /// they do so ever more slowly.
    moves: Backoff,
}

/// A connection on which the session is attached.
struct Line {
    connection: EventsConnection,
    attachment: Arc<Attachment>,
}

impl Lifeline {
    /// Nothing is connected yet.
    pub(crate) fn new(
        connector: Connector,
        session: Arc<Session>,
        nodes: Weak<Nodes>,
        node: Weak<Node>,
    ) -> Self {
        Self {
            session,
            connector,
            nodes,
            node,
            answered: Instant::now(),
            given_up: None,
            moves: Backoff::new(),
        }
    }

    /// Attaches and listens until it is aborted, with the node, or another connection takes the
    /// session over.
    pub(crate) async fn run(mut self) {
        let mut line = self.attach().await;
        loop {
            let error = self.listen(&mut line).await;
            if is_taken_over(&error) && !self.may_be_ourselves() {
                return self.over(LostReason::TakenOver);
            }
            let moving = error.is_no_session();
            self.give_up(error);
            if moving {
                sleep(self.moves.next()).await;
            }
            // The old connection is kept until then: if only its replies are late, closing it would
            // cost our waiters their places.
            line = self.attach().await;
        }
    }

    fn over(&self, reason: LostReason) {
        self.session.over(reason);
        for hold in self.holds() {
            hold.lose(reason);
        }
    }

    fn holds(&self) -> Vec<Arc<Hold>> {
        match (self.nodes.upgrade(), self.node.upgrade()) {
            (Some(nodes), Some(node)) => nodes.holds_at(&node),
            _ => Vec::new(),
        }
    }

    fn give_up(&mut self, error: Error) {
        if !is_taken_over(&error) {
            self.given_up = Some(Instant::now());
        }
        if let Some(nodes) = self.nodes.upgrade() {
            nodes.doubt();
        }
        self.session.broken(error);
    }

    /// A call that was given up may reach the server long after, when the network lets it through:
    /// then it is our own former connection that takes the session over, and it is gone already.
    fn may_be_ourselves(&self) -> bool {
        self.given_up.is_some_and(|at| at.elapsed() < STRAY_FOR)
    }

    /// Calls and delivers until a call fails.
    async fn listen(&mut self, line: &mut Line) -> Error {
        let wait = wait_in(self.session.grace);
        let within = wait.saturating_add(self.slack());
        loop {
            let call = command::events(&self.session.name, Some(wait), self.session.grace);
            let sent = Instant::now();
            let events = match line.connection.ask(call, within).await {
                Ok(events) => events,
                Err(error) => return error,
            };
            self.moves = Backoff::new();
            if !line.attachment.confirm(sent, Instant::now()) {
                // The session has outlived our confidence in it. What was held then stays lost.
                line.attachment = self.session.attached(sent, line.connection.server());
            }
            self.deliver(events, sent);
        }
    }

    /// Connects and attaches until it works, and has all holds confirmed.
    async fn attach(&mut self) -> Line {
        let mut backoff = Backoff::new();
        loop {
            match self.try_to_attach().await {
                Ok((connection, events, sent)) => {
                    let attachment = self.session.attached(sent, connection.server());
                    self.deliver(events, sent);
                    self.confirm_holds(&attachment);
                    return Line {
                        connection,
                        attachment,
                    };
                }
                Err(error) => self.give_up(error),
            }
            sleep(backoff.next()).await;
        }
    }

    /// The first call on a connection is answered at once, and so confirms at once.
    async fn try_to_attach(&self) -> Result<(EventsConnection, Vec<Event>, Instant), Error> {
        let mut connection = self.connector.for_events().await?;
        let call = command::events(&self.session.name, None, self.session.grace);
        let sent = Instant::now();
        let within = self.connector.response_timeout();
        let events = connection.ask(call, within).await?;
        Ok((connection, events, sent))
    }

    fn deliver(&mut self, events: Vec<Event>, sent: Instant) {
        let since = std::mem::replace(&mut self.answered, sent);
        let (Some(nodes), Some(node)) = (self.nodes.upgrade(), self.node.upgrade()) else {
            return;
        };
        let mut lost = Vec::new();
        for event in events {
            match nodes.registry.deliver(event, since, &node) {
                Delivered::Done => {}
                Delivered::Lost(holds, reason) => {
                    lost.extend(holds.into_iter().map(|hold| (hold, reason)));
                }
                Delivered::Stray(stray) => nodes.give_back(stray),
            }
        }
        self.session.told(sent);
        if !lost.is_empty() {
            tokio::spawn(async move { verify(&nodes, lost).await });
        }
    }

    fn confirm_holds(&self, attachment: &Arc<Attachment>) {
        let mut holds = self.holds();
        // The others were granted or confirmed since.
        holds.retain(|hold| !hold.counts_on(attachment));
        let Some(nodes) = self.nodes.upgrade().filter(|_| !holds.is_empty()) else {
            return;
        };
        // Attached anew, it is all begun anew.
        let (session, attachment) = (Arc::clone(&self.session), Arc::clone(attachment));
        let is_present = move || {
            let present = session.attachment();
            present.is_some_and(|present| Arc::ptr_eq(&present, &attachment))
        };
        tokio::spawn(async move { renewal::confirm(&nodes, holds, is_present).await });
    }

    /// How long after its time an answer is given up. With a grace there must be time left to
    /// connect anew and have the holds confirmed.
    fn slack(&self) -> Duration {
        let timeout = self.connector.response_timeout();
        match part(self.session.grace, PARTS) {
            Duration::ZERO => timeout,
            quarter => quarter.min(timeout),
        }
    }
}

/// Asks about holds of which an event says that they are lost: it may be about an earlier hold of
/// the same owner, whose guard has gone since. What cannot be learned counts as lost; but in a
/// cluster the lock may have moved, and then the word of the node that it has left says nothing.
pub(crate) async fn verify(nodes: &Arc<Nodes>, lost: Vec<(Arc<Hold>, LostReason)>) {
    let mut backoff = Backoff::new();
    let mut lost = lost;
    loop {
        let holds = lost.iter().map(|(hold, _)| Arc::clone(hold)).collect();
        for (site, holds) in renewal::by_site(nodes, holds) {
            // Before it is asked, too: what was granted in between may have gone again.
            let meant: Vec<_> = holds
                .iter()
                .filter(|hold| is_meant(hold))
                .cloned()
                .collect();
            let is_meant =
                |hold: &_| meant.iter().any(|one| Arc::ptr_eq(one, hold)) && is_meant(hold);
            for (hold, told) in renewal::ask(nodes, site, holds).await {
                match told {
                    Ok((true, renewal)) if is_meant(&hold) => drop(hold.renewed(true, &renewal)),
                    Err(_) if nodes.are_several() => continue,
                    Ok(_) | Err(_) => lose(&hold, &lost),
                }
                lost.retain(|(one, _)| !Arc::ptr_eq(one, &hold));
            }
        }
        // Its validity ends in any case, unless the node where it is confirms it.
        lost.retain(|(hold, _)| hold.lost().is_none());
        if lost.is_empty() {
            return;
        }
        sleep(backoff.next()).await;
    }
}

/// With the reason that the server gave.
fn lose(hold: &Arc<Hold>, lost: &[(Arc<Hold>, LostReason)]) {
    let said = lost.iter().find(|(one, _)| Arc::ptr_eq(one, hold));
    hold.lose(said.map_or(LostReason::NotHeld, |(_, reason)| *reason));
}

/// One that the server cannot tell by its token from a later one of its owner may have been lost if
/// there is another.
fn is_meant(hold: &Arc<Hold>) -> bool {
    hold.target().mode().has_token() || registry::is_the_only_one(hold)
}

/// Only somebody who calls RLOCK.EVENTS with the name of this session can do that.
fn is_taken_over(error: &Error) -> bool {
    error.is_taken_over()
}

/// How long the server holds a call before it answers that nothing has happened.
///
/// A quarter of the grace: an answer confirms the moment in which the call was sent, so when the
/// next one is late there is half of the grace left.
fn wait_in(grace: Duration) -> Duration {
    match part(grace, PARTS) {
        Duration::ZERO => LONGEST_WAIT,
        quarter => quarter.min(LONGEST_WAIT),
    }
}

const PARTS: u32 = 4;

/// For so long after a call was given up it may still arrive.
const STRAY_FOR: Duration = Duration::from_secs(60);

/// So often at least the life-line is tried, whatever the grace.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_life_line_is_confirmed_more_often_than_every_third_of_the_grace() {
        assert_eq!(wait_in(Duration::from_secs(1)), Duration::from_millis(250));
        assert_eq!(wait_in(Duration::ZERO), LONGEST_WAIT);
        assert_eq!(wait_in(Duration::from_secs(3_600)), LONGEST_WAIT);
    }
}
