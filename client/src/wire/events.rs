//! The task that keeps the session attached: RLOCK.EVENTS, again and again, on a connection of its
//! own.

use std::collections::BTreeSet;
use std::pin::{Pin, pin};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::time::{Instant, timeout};

use crate::wire::{
    Attachment, Call, ClientId, Connection, Connector, Event, Purpose, ServerId, Session, Told,
    kills, part_of_grace, request,
};
use crate::{Error, Pace, part};

/// Who hears what happens at the servers of a client.
pub(crate) trait Listener: Send + Sync {
    /// Whether to attach to this server, which a connection has reached. Not where the session is
    /// attached by another node of the client: the two would take it over from each other.
    fn may_attach(&self, session: &Session, server: &ServerId) -> bool;

    /// What the server of this session has told; none of it happened before `since`.
    fn told(self: Arc<Self>, session: &Session, events: Vec<Event>, since: Instant);

    /// The session is attached anew. What counts on an earlier attachment is to be confirmed.
    fn attached(self: Arc<Self>, session: &Arc<Session>, attachment: &Arc<Attachment>);

    /// A session connection does not answer, and another is tried.
    fn broken(&self);

    /// These slots have moved: what is held there is to be confirmed where they are now.
    fn moved(self: Arc<Self>, slots: &BTreeSet<u16>);

    /// Whether something held counts on this session, be it attached at present or not.
    fn counts_on(&self, session: &Session) -> bool;
}

/// What the task works with. It does not keep the client alive.
struct Events {
    session: Arc<Session>,
    connector: Connector,
    listener: Weak<dyn Listener>,
    pace: Pace,
    /// How late the answers come. Where the way is long each of them would be overdue.
    late: Duration,
}

/// A runtime that ends takes this along. Kept locks would be handed on, of whose loss nobody hears.
impl Drop for Events {
    fn drop(&mut self) {
        self.session.ended();
    }
}

/// A connection on which the session is attached.
struct Line {
    connection: Connection,
    /// Another that was attached at the same time. Its call may have been the last of the two to
    /// reach the server, and closing it would then cost our waiters their places: so it is kept
    /// until a later call is answered here.
    former: Option<Connection>,
    attachment: Arc<Attachment>,
    /// That of the session. In another one it has begun anew, and the attachment says nothing.
    life: i64,
}

/// The answer to a call.
type Answer = Result<Told, Error>;

/// A connection whose first call was answered, with what, and when that was sent. The session does
/// not count as attached by it before it [goes on](Session::goes_on) so.
type Fresh = (Box<Line>, Vec<Event>, Instant);

/// How a call ended.
enum Heard {
    /// It was answered, maybe late.
    Here(Answer),
    /// A new connection was asked too. What has come of the old call by then, if anything has.
    Elsewhere(Result<Fresh, Error>, Option<Answer>),
}

/// Attaches and listens until it is aborted, with the node.
///
/// If another connection takes the session over, it is taken back: it may be our own, given up long
/// ago, or that of another node of this client, of which nobody knows yet that it is the same
/// server. A stranger who knows the session's name can only be as slow and as often.
pub(crate) async fn run(connector: Connector, session: Arc<Session>, listener: Weak<dyn Listener>) {
    let mut events = Events {
        session,
        connector,
        listener,
        pace: Pace::default(),
        late: Duration::ZERO,
    };
    let mut line = events.attach().await;
    loop {
        let error = events.listen(&mut line).await;
        events.broken(error);
        events.give_up(line.connection.id());
        // The old connection is kept until then: if only its replies are late, closing it would
        // cost our waiters their places.
        line = events.attach().await;
    }
}

impl Events {
    /// Tells the client, unless that has gone.
    fn tell(&self, tell: impl FnOnce(Arc<dyn Listener>)) {
        if let Some(client) = self.listener.upgrade() {
            tell(client);
        }
    }

    fn broken(&self, error: Error) {
        self.tell(|listener| listener.broken());
        self.session.broken(error);
    }

    /// Calls and delivers until a call fails.
    async fn listen(&mut self, line: &mut Line) -> Error {
        let longest = wait_in(self.session.grace);
        let (mut at_once, mut was_late) = (false, false);
        loop {
            let within = longest.saturating_add(self.slack());
            let sent = Instant::now();
            // Asked at once whether the session is there after a silence that was too long, and so
            // that the other connection can be closed; but not again and again. And when an answer
            // was late, which says nothing of the time since it was asked for: before the next
            // answer another silence would come on top of that.
            let is_doubted = was_late || line.attachment.is_over(sent) || line.former.is_some();
            at_once = !at_once && is_doubted;
            let wait = Some(longest).filter(|_| !at_once);
            let id = line.connection.id();
            let heard = {
                let session = Arc::clone(&self.session);
                let asked = hear_all(&session, &mut line.connection, wait, Vec::new());
                let mut asked = pin!(asked);
                match timeout(within, &mut asked).await {
                    Ok(answer) => Heard::Here(answer),
                    Err(_) => self.overdue(asked, id).await,
                }
            };
            if let Some(late) = sent.elapsed().checked_sub(wait.unwrap_or_default()) {
                was_late = late >= part_of_grace(self.session.grace, 8);
                // Forgotten by and by: one silence says little about those to come.
                self.late = late.max(part(self.late, 8).saturating_mul(7));
            }
            let goes_on = match heard {
                Heard::Here(Ok(told)) => self.answered(line, sent, told),
                Heard::Elsewhere(Ok(fresh), old) => self.replace(line, sent, fresh, old),
                Heard::Here(Err(error)) => Err(error),
                Heard::Elsewhere(Err(error), old) => {
                    if let Some(Ok(told)) = old {
                        self.deliver(told.events, sent);
                    }
                    Err(error)
                }
            };
            if let Err(error) = goes_on {
                return error;
            }
        }
    }

    /// An error, if the session has begun anew: then it is to be attached anew as well.
    fn answered(&mut self, line: &mut Line, sent: Instant, told: Told) -> Result<(), Error> {
        let Told { life, events, .. } = told;
        line.former = None;
        if life != line.life {
            self.deliver(events, sent);
            return Err(Error::not_attached());
        }
        if line.attachment.confirm(sent, Instant::now()) {
            self.session.goes_on(&line.attachment);
            self.deliver(events, sent);
            return Ok(());
        }
        // The session has outlived our confidence in it. What was held then stays lost, and an
        // answer that is so late says nothing about the present.
        self.session.broken(Error::not_attached());
        self.deliver(events, sent);
        line.attachment = self.session.attachment_at(&line.connection.server, sent);
        if !line.attachment.is_over(Instant::now()) {
            self.session.goes_on(&line.attachment);
        }
        Ok(())
    }

    /// The answer to a call is overdue: connects anew, and keeps the call alive meanwhile. A server
    /// that stood still for a moment answers it then, and nothing has been lost.
    async fn overdue(
        &mut self,
        mut call: Pin<&mut impl Future<Output = Answer>>,
        on: Option<ClientId>,
    ) -> Heard {
        self.broken(Error::no_reply(None));
        // Nothing is asked on the new connection before this, so closing it means nothing.
        let connection = tokio::select! {
            biased;
            answer = &mut call => return Heard::Here(answer),
            connection = self.open() => connection,
        };
        // It may take the session over from now on, so its answer is waited for in any case.
        let mut old = None;
        let fresh = {
            let mut attaching = pin!(self.attach_on(connection));
            loop {
                tokio::select! {
                    biased;
                    answer = &mut call, if old.is_none() => old = Some(answer),
                    fresh = &mut attaching => break fresh,
                }
            }
        };
        let Ok(attached) = fresh else {
            return Heard::Elsewhere(fresh, old);
        };
        if old.is_none() {
            // The server has answered it before, if it had the call: with events, or that it was
            // taken over. Not for longer than this: the time is for having the holds confirmed.
            let usual = part_of_grace(self.session.grace, 4);
            old = timeout(self.slack().min(usual), call).await.ok();
        }
        // A connection that has broken meanwhile may still deliver the call.
        let is_answered = |old: &Answer| !old.as_ref().is_err_and(Error::is_unknown);
        if old.as_ref().is_some_and(is_answered) {
            return Heard::Elsewhere(Ok(attached), old);
        }
        self.give_up(on);
        Heard::Elsewhere(self.attach_again(attached).await, None)
    }

    /// The call before was given up. It may have come behind ours, taken the session over, and been
    /// told what has happened since: not before this does the server close its connection.
    async fn attach_again(&mut self, (line, mut events, asked): Fresh) -> Result<Fresh, Error> {
        match self.attach_on(line.connection).await {
            Ok((line, later, sent)) => {
                events.extend(later);
                Ok((line, events, sent))
            }
            Err(error) => {
                self.deliver(events, asked);
                Err(error)
            }
        }
    }

    /// Both connections may have the session now. If the old one has answered, it goes on with that
    /// one, which is told if the session has ended meanwhile; the next call brings it back there.
    /// Otherwise with the new one. If that took the session over while the old call waited, it is
    /// the same session, all has been told, and nothing needs confirming. If not, word of a loss
    /// may have gone with the old connection, or to a stranger who had taken the session over.
    fn replace(
        &mut self,
        line: &mut Line,
        sent: Instant,
        fresh: Fresh,
        old: Option<Answer>,
    ) -> Result<(), Error> {
        let (mut fresh, events, asked) = fresh;
        if let Some(Ok(told)) = old {
            let goes_on = self.answered(line, sent, told);
            self.keep(line, fresh.connection);
            self.deliver(events, asked);
            return goes_on;
        }
        let taker = old.and_then(|old| old.err()?.taken_over_by());
        let by_fresh = taker.is_some() && taker == fresh.connection.client_id;
        let is_same = fresh.connection.server.is_surely(&line.connection.server);
        let unbroken = by_fresh && is_same && fresh.life == line.life;
        if unbroken && line.attachment.confirm(asked, Instant::now()) {
            fresh.attachment = Arc::clone(&line.attachment);
            self.session.goes_on(&fresh.attachment);
            self.deliver(events, asked);
        } else {
            self.attached(&fresh, events, asked);
        }
        let former = std::mem::replace(line, *fresh);
        self.keep(line, former.connection);
        Ok(())
    }

    /// Connects and attaches until it works.
    async fn attach(&mut self) -> Line {
        loop {
            let connection = self.open().await;
            match self.attach_on(connection).await {
                Ok((line, events, sent)) => {
                    self.attached(&line, events, sent);
                    return *line;
                }
                Err(error) => self.broken(error),
            }
        }
    }

    /// Tells what has happened, and has all holds confirmed. In this order: a wait that asks anew
    /// would take its earlier end for that of what it asks for now.
    fn attached(&self, line: &Line, events: Vec<Event>, sent: Instant) {
        self.deliver(events, sent);
        self.session.goes_on(&line.attachment);
        self.tell(|listener| listener.attached(&self.session, &line.attachment));
    }

    /// Connects until it works. Pauses before it for so short a time that it costs no guard, while
    /// there is one that can be kept. A node that stays away is not called any faster by a client
    /// with a short grace than by others.
    async fn open(&mut self) -> Connection {
        loop {
            let grace = self.session.grace;
            let in_grace = self.session.told.borrow().elapsed() < grace;
            let longest = in_grace.then(|| part_of_grace(grace, 4));
            self.pace.keep(longest.unwrap_or(Duration::MAX)).await;
            match self.connector.open().await {
                Ok(connection) => return connection,
                Err(error) => self.broken(error),
            }
        }
    }

    /// The first call on a connection is answered at once, and so confirms at once. Behind it those
    /// that were given up are closed: one of them may have the session, and closing it before would
    /// cost our waiters their places.
    async fn attach_on(&mut self, mut connection: Connection) -> Result<Fresh, Error> {
        let may_attach =
            |client: Arc<dyn Listener>| client.may_attach(&self.session, &connection.server);
        if !self.listener.upgrade().is_none_or(may_attach) {
            return Err(Error::elsewhere());
        }
        let opened = &self.connector.former;
        opened.add(connection.id(), Purpose::Session);
        let former = opened.before(&connection.server, Purpose::Session);
        let sent = Instant::now();
        let asked = hear_all(&self.session, &mut connection, None, kills(&former));
        let answer = timeout(self.connector.dialer.response_timeout, asked).await;
        let answer = answer.unwrap_or_else(|_| Err(Error::no_reply(None)));
        match &answer {
            Ok(_) => opened.are_closed(&former),
            Err(_) => self.give_up(connection.id()),
        }
        let Told { life, events, .. } = answer?;
        let line = Box::new(Line {
            attachment: self.session.attachment_at(&connection.server, sent),
            connection,
            former: None,
            life,
        });
        Ok((line, events, sent))
    }

    /// Keeps a connection beside the one of this line. The next that attaches closes it.
    fn keep(&self, line: &mut Line, connection: Connection) {
        self.give_up(connection.id());
        line.former = Some(connection);
    }

    fn give_up(&self, id: Option<ClientId>) {
        self.connector.former.add(id, Purpose::FormerSession);
    }

    fn deliver(&self, events: Vec<Event>, sent: Instant) {
        let since = *self.session.told.borrow();
        self.tell(|listener| listener.told(&self.session, events, since));
        self.session.told.send_replace(sent);
    }

    /// How long after its time an answer is overdue: later than answers usually come. With a grace
    /// there must be time left to connect anew and have the holds confirmed.
    fn slack(&self) -> Duration {
        let grace = |of| part_of_grace(self.session.grace, of);
        let usual = self.late.saturating_mul(2).min(grace(2));
        grace(4)
            .max(usual)
            .min(self.connector.dialer.response_timeout)
    }
}

/// Asks until all has been told that had happened before the first sending. One reply has at most
/// 1,000 events. If a later reply is lost, the events of the earlier ones are lost too, as with any
/// lost reply: then everything is confirmed anew.
async fn hear_all(
    session: &Session,
    connection: &mut Connection,
    wait: Option<Duration>,
    kills: Vec<Call>,
) -> Answer {
    let call = |wait| request::events(&session.name, wait, session.grace);
    let mut told = connection.ask_here(call(wait), kills).await?;
    while !told.is_all {
        let rest = connection.ask_here(call(None), Vec::new()).await?;
        told.events.extend(rest.events);
        (told.life, told.is_all) = (rest.life, rest.is_all);
    }
    Ok(told)
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
