//! The task that keeps the session attached: RLOCK.EVENTS, again and again, on a connection of its
//! own.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, timeout};

use crate::backoff::{Backoff, LASTING};
use crate::error::Error;
use crate::lost_reason::LostReason;
use crate::time::part;
use crate::wire::connection::{Connector, EventsConnection, ServerId};
use crate::wire::reply::Event;
use crate::wire::request;
use crate::wire::session::{Attachment, Session};

/// Who hears of what the server tells, and of how the session is.
pub(crate) trait SessionListener: Send + 'static {
    /// Whether to attach to this server, which a connection has reached. Not where the session is
    /// attached by another node of the client: the two would take it over from each other for good.
    fn may_attach(&self, server: &ServerId) -> bool;

    /// Whether it may be another node of the client that has taken the session over there.
    fn may_be_a_twin(&self, server: &ServerId) -> bool;

    /// None of it happened before `since`.
    fn told(&self, events: Vec<Event>, since: Instant);

    /// The session is attached anew. What counts on an earlier attachment is to be confirmed.
    fn attached(&self, attachment: &Arc<Attachment>);

    /// The session connection does not answer, and another is tried.
    fn broken(&self);

    /// The session will not come back.
    fn over(&self, reason: LostReason);
}

/// What the task works with. It does not keep the client alive.
pub(crate) struct Events<L> {
    session: Arc<Session>,
    connector: Connector,
    listener: L,
    /// When the last call that was answered had been sent. What has not been told in its answer
    /// has not happened before.
    latest: Instant,
    /// When a call was last given up without an answer.
    given_up: Option<Instant>,
    /// The pauses before the next connection. They begin anew only when one has lasted: a peer that
    /// closes each connection at its first call is asked ever more slowly, and so are two servers
    /// between which our connections follow each other.
    pauses: Backoff,
}

/// A connection on which the session is attached.
struct Line {
    connection: EventsConnection,
    /// Since when.
    since: Instant,
    /// Another that was attached at the same time. Its call may have been the last of the two to
    /// reach the server, and closing it would then cost our waiters their places: so it is kept
    /// until a later call is answered here.
    former: Option<EventsConnection>,
    attachment: Arc<Attachment>,
}

/// The answer to a call.
type Answer = Result<Vec<Event>, Error>;

/// A connection whose first call was answered.
struct Fresh {
    connection: EventsConnection,
    events: Vec<Event>,
    sent: Instant,
}

/// How a call ended.
enum Heard {
    /// It was answered, maybe late.
    Here(Answer),
    /// A new connection was asked too. What has come of the old call by then, if anything has.
    Elsewhere(Result<Fresh, Error>, Option<Answer>),
}

impl<L: SessionListener> Events<L> {
    /// Nothing is connected yet.
    pub(crate) fn new(connector: Connector, session: Arc<Session>, listener: L) -> Self {
        let pauses = pauses(session.grace);
        Self {
            session,
            connector,
            listener,
            latest: Instant::now(),
            given_up: None,
            pauses,
        }
    }

    /// Attaches and listens until it is aborted, with the node, or another connection takes the
    /// session over.
    pub(crate) async fn run(mut self) {
        let mut line = self.attach().await;
        loop {
            let error = self.listen(&mut line).await;
            if is_taken_over(&error) && !self.may_be_ourselves(line.connection.server()) {
                return self.over(LostReason::SessionTakenOver);
            }
            self.give_up(error);
            sleep(self.pauses.next()).await;
            // The old connection is kept until then: if only its replies are late, closing it would
            // cost our waiters their places.
            line = self.attach().await;
        }
    }

    fn over(&self, reason: LostReason) {
        self.session.over(reason);
        self.listener.over(reason);
    }

    fn give_up(&mut self, error: Error) {
        if !is_taken_over(&error) {
            self.given_up = Some(Instant::now());
        }
        self.broken(error);
    }

    fn broken(&self, error: Error) {
        self.listener.broken();
        self.session.broken(error);
    }

    /// A call that was given up may reach the server long after, when the network lets it through:
    /// then it is our own former connection that takes the session over, and it is gone already.
    /// Or the server has two names, and is two nodes of the client until that is known.
    fn may_be_ourselves(&self, server: &ServerId) -> bool {
        let stray = self.given_up.is_some_and(|at| at.elapsed() < STRAY_FOR);
        stray || self.listener.may_be_a_twin(server)
    }

    /// Calls and delivers until a call fails.
    async fn listen(&mut self, line: &mut Line) -> Error {
        let wait = wait_in(self.session.grace);
        let within = wait.saturating_add(self.slack());
        let mut at_once = false;
        loop {
            let sent = Instant::now();
            // Asked at once whether the session is there after a silence that was too long, and so
            // that the other connection can be closed; but not again and again.
            at_once = !at_once && (line.attachment.is_over(sent) || line.former.is_some());
            let wait = Some(wait).filter(|_| !at_once);
            let call = request::events(&self.session.name, wait, self.session.grace);
            let heard = {
                let mut asked = pin!(line.connection.ask(call));
                match timeout(within, &mut asked).await {
                    Ok(answer) => Heard::Here(answer),
                    Err(_) => self.overdue(asked).await,
                }
            };
            match heard {
                Heard::Here(Ok(events)) => self.answered(line, sent, events),
                Heard::Elsewhere(Ok(fresh), old) => self.replace(line, sent, fresh, old),
                Heard::Here(Err(error)) => return error,
                Heard::Elsewhere(Err(error), old) => {
                    if let Some(Ok(events)) = old {
                        self.deliver(events, sent);
                    }
                    return error;
                }
            }
        }
    }

    fn answered(&mut self, line: &mut Line, sent: Instant, events: Vec<Event>) {
        line.former = None;
        if line.since.elapsed() >= LASTING {
            self.pauses = pauses(self.session.grace);
        }
        if line.attachment.confirm(sent, Instant::now()) {
            self.session.goes_on(&line.attachment);
        } else {
            // The session has outlived our confidence in it. What was held then stays lost, and
            // an answer that is so late says nothing about the present.
            self.session.broken(Error::not_attached());
            line.attachment = self
                .session
                .attached_if_present(sent, line.connection.server());
        }
        self.deliver(events, sent);
    }

    /// The answer to a call is overdue: connects anew, and keeps the call alive meanwhile. A server
    /// that stood still for a moment answers it then, and nothing has been lost.
    async fn overdue(&mut self, mut call: Pin<&mut impl Future<Output = Answer>>) -> Heard {
        self.broken(Error::no_reply(None));
        // Nothing is asked on the new connection before this, so closing it means nothing.
        let connection = tokio::select! {
            biased;
            answer = &mut call => return Heard::Here(answer),
            connection = self.open() => connection,
        };
        // It may take the session over from now on, so its answer is waited for in any case.
        let mut attaching = pin!(self.attach_on(connection));
        let mut old = None;
        let fresh = loop {
            tokio::select! {
                biased;
                answer = &mut call, if old.is_none() => old = Some(answer),
                fresh = &mut attaching => break fresh,
            }
        };
        if old.is_none() && fresh.is_ok() {
            // The server has answered it before, if it had the call: with events, or that it was
            // taken over.
            old = timeout(self.slack(), call).await.ok();
        }
        Heard::Elsewhere(fresh, old)
    }

    /// Both connections may have the session now. If the old one has answered, it goes on with that
    /// one, which is told if the session has ended meanwhile; the next call brings it back there.
    /// Otherwise with the new one. If that took the session over while the old call waited, it is
    /// the same session, all has been told, and nothing needs confirming. If not, word of a loss
    /// may have gone with the old connection.
    fn replace(&mut self, line: &mut Line, sent: Instant, fresh: Fresh, old: Option<Answer>) {
        let Fresh {
            connection,
            events,
            sent: asked,
        } = fresh;
        if let Some(Ok(told)) = old {
            self.answered(line, sent, told);
            line.former = Some(connection);
            return self.deliver(events, asked);
        }
        let taken_over = matches!(old, Some(Err(error)) if is_taken_over(&error));
        if !taken_over {
            self.given_up = Some(Instant::now());
        }
        let unbroken = taken_over && connection.server().is_surely(line.connection.server());
        line.former = Some(std::mem::replace(&mut line.connection, connection));
        line.since = Instant::now();
        if unbroken && line.attachment.confirm(asked, Instant::now()) {
            self.session.goes_on(&line.attachment);
            self.deliver(events, asked);
        } else {
            line.attachment = self.session.attached(asked, line.connection.server());
            self.deliver(events, asked);
            self.listener.attached(&line.attachment);
        }
    }

    /// Connects and attaches until it works, and has all holds confirmed.
    async fn attach(&mut self) -> Line {
        loop {
            match self.try_to_attach().await {
                Ok(fresh) => {
                    let Fresh {
                        connection,
                        events,
                        sent,
                    } = fresh;
                    let attachment = self.session.attached(sent, connection.server());
                    self.deliver(events, sent);
                    self.listener.attached(&attachment);
                    return Line {
                        connection,
                        since: Instant::now(),
                        former: None,
                        attachment,
                    };
                }
                Err(error) => self.give_up(error),
            }
            sleep(self.pauses.next()).await;
        }
    }

    async fn try_to_attach(&self) -> Result<Fresh, Error> {
        let connection = self.connector.for_events().await?;
        self.attach_on(connection).await
    }

    /// Connects until it works.
    async fn open(&mut self) -> EventsConnection {
        loop {
            match self.connector.for_events().await {
                Ok(connection) => return connection,
                Err(error) => self.broken(error),
            }
            sleep(self.pauses.next()).await;
        }
    }

    /// The first call on a connection is answered at once, and so confirms at once.
    async fn attach_on(&self, mut connection: EventsConnection) -> Result<Fresh, Error> {
        if !self.listener.may_attach(connection.server()) {
            return Err(Error::elsewhere());
        }
        let call = request::events(&self.session.name, None, self.session.grace);
        let sent = Instant::now();
        let events = timeout(self.connector.response_timeout(), connection.ask(call)).await;
        let events = events.map_err(|_| Error::no_reply(None))??;
        Ok(Fresh {
            connection,
            events,
            sent,
        })
    }

    fn deliver(&mut self, events: Vec<Event>, sent: Instant) {
        let since = std::mem::replace(&mut self.latest, sent);
        self.listener.told(events, since);
        self.session.told(sent);
    }

    /// How long after its time an answer is overdue. With a grace there must be time left to
    /// connect anew and have the holds confirmed.
    fn slack(&self) -> Duration {
        let response_timeout = self.connector.response_timeout();
        match part(self.session.grace, 4) {
            Duration::ZERO => response_timeout,
            quarter => quarter.min(response_timeout),
        }
    }
}

/// Only somebody who calls RLOCK.EVENTS with the name of this session can do that.
fn is_taken_over(error: &Error) -> bool {
    error.is_taken_over()
}

/// How long the server holds a call before it answers that nothing has happened.
///
/// An answer confirms the moment in which its call was sent. So when a silence begins just before
/// an answer, the last confirmed moment is twice this ago by its end, and a silence of nine tenths
/// of the grace, less 100 ms, must fit into the rest: the contract asks for a third at most, and a
/// guard needs this.
fn wait_in(grace: Duration) -> Duration {
    let wait = part(grace, 33).saturating_add(WAIT_ON_TOP);
    match wait.min(part(grace, 3)) {
        Duration::ZERO => LONGEST_WAIT,
        wait => wait.min(LONGEST_WAIT),
    }
}

/// The pauses between connections: with a grace none is so long that it costs the guards.
fn pauses(grace: Duration) -> Backoff {
    match part(grace, 4) {
        Duration::ZERO => Backoff::new(),
        quarter => Backoff::up_to(quarter),
    }
}

const WAIT_ON_TOP: Duration = Duration::from_millis(25);

/// For so long after a call was given up it may still arrive.
pub(crate) const STRAY_FOR: Duration = Duration::from_secs(60);

/// So often at least the session connection is tried, whatever the grace.
const LONGEST_WAIT: Duration = Duration::from_secs(2);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::time::drift;

    #[test]
    fn a_silence_of_nine_tenths_of_the_grace_less_100_ms_leaves_time_for_the_answer() {
        for ms in [500, 1_000, 2_000, 5_000, 20_000, 60_000, 3_600_000] {
            let grace = Duration::from_millis(ms);
            let wait = wait_in(grace);
            let silence = grace.saturating_sub(part(grace, 10) + Duration::from_millis(100));
            let left = grace.saturating_sub(drift(grace) + wait * 2 + silence);
            assert!(left > Duration::from_millis(60), "{grace:?}: {left:?}");
        }
    }

    #[test]
    fn it_is_asked_anew_every_third_of_the_grace_at_least() {
        for ms in 3..3_000 {
            let grace = Duration::from_millis(ms);
            assert!(wait_in(grace) <= part(grace, 3), "{grace:?}");
        }
        assert_eq!(wait_in(Duration::ZERO), LONGEST_WAIT);
        assert_eq!(wait_in(Duration::from_secs(3_600)), LONGEST_WAIT);
    }
}
