//! Waiting in the queue: `RLOCK.ACQUIRE … QUEUE`, and the event that ends it.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::backoff::Backoff;
use crate::error::Error;
use crate::flows::acquire::{
    Asked, QueuePermit, Reply, Request, WaitMode, deliver, granted, prefer_unknown,
};
use crate::flows::release;
use crate::flows::renew::{self, Aim};
use crate::ledger::{Grant, Hold, Notification, Usage};
use crate::time::Lease;
use crate::topology::{AttachedRoute, MAX_REDIRECTS, Node, Route};
use crate::wire::commands::Answer;
use crate::wire::reply::{Acquired, EventKind, Redirect};
use crate::wire::request::{self, Mode, Subject};
use crate::wire::session::Attachment;

/// Waits until the owner has left the queue, and then joins it. `last` is what the caller
/// would be told if its time were up now.
pub(crate) async fn in_turn(request: Request, last: Error, mut reply: Reply) {
    let permits = async {
        let mut permits = SmallVec::new();
        for permit in request.target.permits() {
            permits.push(permit.lock_owned().await);
        }
        permits
    };
    let permits = tokio::select! {
        permits = permits => permits,
        end = ending(&request, &mut reply, Duration::ZERO) => return end.tell(reply, last),
    };
    let usage = request.target.claim(request.options);
    let permit = QueuePermit::new(&request.context, &usage, permits);
    run(request, usage, permit, None, last, reply).await;
}

/// Waits in the queue and tells the caller how it ended.
pub(crate) async fn run(
    request: Request,
    usage: Usage,
    permit: QueuePermit,
    asked: Option<Asked>,
    last: Error,
    mut reply: Reply,
) {
    let span = permit.span.clone();
    let request = Arc::new(request);
    let mut wait = Wait {
        request: Arc::clone(&request),
        usage,
        permit,
        last,
        lease: Duration::ZERO,
        routes: Vec::new(),
        hops: 0,
        unanswered: None,
        queued: false,
        unheard: false,
        recall: Recall::BesideOthers,
    };
    let outcome = span.around(wait.outcome(asked, &mut reply)).await;
    match outcome {
        Outcome::Granted(grant) => {
            let Wait { usage, permit, .. } = wait;
            let held = granted(&request, usage, Some(permit), grant);
            deliver(held, reply).await;
        }
        Outcome::Refused(error) => {
            let _ = reply.send(Err(error));
            // Where it was asked for last nothing is left.
            wait.routes.pop();
            wait.withdraw().await;
        }
        Outcome::Ended(end) => {
            let last = wait.last.clone();
            end.tell(reply, last);
            wait.withdraw().await;
        }
    }
}

/// How a wait ends.
enum Outcome {
    Granted(Grant),
    /// By the server's word: nothing of it is left there.
    Refused(Error),
    /// The caller waits no more, or may not; the server may not know that yet.
    Ended(Ending),
}

/// What comes next in a wait.
enum Next {
    End(Outcome),
    /// Ask again, since the session was attached anew, or the lock is at another node.
    AskAgain,
    /// Ask at this route, to which a node has sent us on.
    AskThere(Route),
    /// Ask again after a pause: the connection or the server went away.
    Pause(Error),
}

struct Wait {
    request: Arc<Request>,
    usage: Usage,
    permit: QueuePermit,
    /// What the caller is told if its time is up.
    last: Error,
    /// The lease that was last asked for.
    lease: Duration,
    /// Where something of it may stand: where it was asked for last, and before that if nobody has
    /// said since that the lock is not there any more.
    routes: Vec<Route>,
    /// How often in a row it was sent on.
    hops: u32,
    /// The answer that was not waited for, if it is that to which the caller left.
    unanswered: Option<Answer<Acquired>>,
    /// Whether the server has taken it in. Before that a lost server ends the call; after it the
    /// wait goes on until the server is back.
    queued: bool,
    /// Whether an ACQUIRE was sent of which nobody knows what has come of it.
    unheard: bool,
    recall: Recall,
}

/// What is known of a waiter that is called back.
struct WayOut {
    /// Where what it may have been granted is given back.
    last: Route,
    /// Where it was called back.
    cancelled_at: Vec<Arc<Node>>,
    backoff: Backoff,
}

/// Whether what may be in the queue is called back before the lock is asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Recall {
    /// Beside other calls of the owner: for those ONCE is not sent.
    BesideOthers,
    /// Always: something was there that ONCE does not take over.
    Always,
    /// The same, and of an earlier CANCEL nobody knows what has come of it: its event may follow.
    Unheard,
}

impl Wait {
    async fn outcome(&mut self, mut asked: Option<Asked>, reply: &mut Reply) -> Outcome {
        let mut backoff = Backoff::new();
        let (mut known, mut there) = (None, None);
        loop {
            let next = match asked.take() {
                Some(asked) => Ok(asked),
                None => self.ask(known.as_ref(), there.take(), reply).await,
            };
            let next = match next {
                Ok(asked) => {
                    known = Some(asked.at.clone());
                    self.begin(&asked.at.route);
                    self.stay(asked, reply).await
                }
                Err(next) => next,
            };
            let pause = match next {
                Next::End(outcome) => return outcome,
                Next::AskAgain => None,
                Next::AskThere(route) => {
                    there = Some(route);
                    self.hops = self.hops.saturating_add(1);
                    // Two nodes that have not yet heard of a move send us to each other.
                    (self.hops > MAX_REDIRECTS).then(|| backoff.next())
                }
                Next::Pause(error) => {
                    self.last = prefer_unknown(self.last.clone(), error);
                    known = None;
                    Some(backoff.next())
                }
            };
            if let Some(pause) = pause {
                tokio::select! {
                    () = sleep(pause) => {}
                    end = ending(&self.request, reply, Duration::ZERO) => {
                        return Outcome::Ended(end);
                    }
                }
            }
        }
    }

    /// From now on something of it may stand there; the last of the routes is the present one.
    fn begin(&mut self, route: &Route) {
        self.routes.retain(|other| !other.is_at(&route.node));
        self.routes.push(route.clone());
    }

    /// Asks where a node has sent us; or where the lock is, under an attachment other than `known`,
    /// as soon as there is one.
    async fn ask(
        &mut self,
        known: Option<&AttachedRoute>,
        there: Option<Route>,
        reply: &mut Reply,
    ) -> Result<Asked, Next> {
        let (context, target) = (&self.request.context, self.usage.target());
        let next = async {
            match there {
                Some(route) => context.router.reach(route).await,
                None if self.queued => context.router.next(target.key(), known).await,
                None => context.router.next_within(target.key(), known).await,
            }
        };
        let at = tokio::select! {
            next = next => next.map_err(|error| self.unreached(error))?,
            end = ending(&self.request, reply, Duration::ZERO) => {
                return Err(Next::End(Outcome::Ended(end)));
            }
        };
        if self.recall != Recall::BesideOthers || !self.usage.is_alone() {
            // ONCE would mistake the hold of another call for ours, so it is not sent; then what
            // may still be in the queue must go first. It can only be ours: it is our turn.
            self.begin(&at.route);
            for route in self.routes.clone() {
                let cancel = request::cancel(self.usage.target().subject());
                match route.send(cancel).await {
                    Ok(0) if self.recall != Recall::Unheard => {}
                    Ok(_) => {
                        self.take_back(vec![Arc::clone(&route.node)]).await;
                    }
                    // Where it may still stand it would be in its own way.
                    Err(error)
                        if self.queued && is_passing(&error) && route.is_at(&at.route.node) =>
                    {
                        self.recall = Recall::Unheard;
                        return Err(Next::Pause(error));
                    }
                    Err(_) => {}
                }
            }
            if self.recall == Recall::Unheard {
                self.recall = Recall::Always;
            }
        }
        if self.queued {
            self.undo_unheard_grant(&at).await.map_err(Next::Pause)?;
        }
        let queue = self.request.queue();
        Ok(Request::ask(&self.usage, queue, at))
    }

    /// Gives several locks back that were granted with no word of it, for that may have gone with a
    /// connection. Beside other holds of the owner ONCE is not sent, and asked for again they would
    /// be held once more than there are guards.
    ///
    /// Whether they were granted shows at one that the owner does not hold otherwise. Were all of
    /// them held otherwise, there would have been no wait.
    async fn undo_unheard_grant(&self, at: &AttachedRoute) -> Result<(), Error> {
        let target = self.usage.target();
        if target.mode() != Mode::Several || self.usage.is_alone() {
            return Ok(());
        }
        let Some(name) = target.alone_at() else {
            return Ok(());
        };
        let one = Subject {
            mode: Mode::Plain,
            names: std::slice::from_ref(name),
            owner: target.owner().as_bytes(),
        };
        let session = &at.route.node.session.name;
        let granted = request::renew(one, self.lease, None, session);
        if at.route.send(granted).await? {
            let release = request::release(target.subject(), None, None);
            at.route.send(release).await?;
        }
        Ok(())
    }

    /// Where it is to be asked for the session is not attached in time.
    fn unreached(&self, error: Error) -> Next {
        if self.queued && error.is_unavailable() && !error.is_taken_over_for_good() {
            return Next::Pause(error);
        }
        Next::End(told(error))
    }

    /// One stay in the queue, until the server answers or the caller waits no more.
    async fn stay(&mut self, asked: Asked, reply: &mut Reply) -> Next {
        let Asked {
            at,
            lease,
            mut answer,
        } = asked;
        self.lease = lease.lease.length;
        // The server ends the wait itself; the time on top is for its answer to arrive.
        let request = Arc::clone(&self.request);
        let on_top = request.context.router.response_timeout;
        let answer = tokio::select! {
            answer = &mut answer => answer,
            told = self.news(&at) => return self.told(told, at).await,
            end = ending(&request, reply, on_top) => {
                self.unanswered = Some(answer);
                return self.left(end);
            }
        };
        match answer {
            Ok(Acquired::Granted { token, fresh }) => {
                let grant = Grant {
                    token,
                    lease: lease.keep(),
                    attachment: Arc::clone(&at.attachment),
                    fresh,
                };
                self.granted(grant, &at).await
            }
            Ok(Acquired::NotHeld { lease_left }) => refused(Error::not_acquired(lease_left)),
            Ok(Acquired::Queued) => {
                // It begins when it is granted, and counts when that is told.
                drop(lease);
                (self.queued, self.hops) = (true, 0);
                self.queued(at, reply).await
            }
            Err(error) => self.failed(error, &at.route),
        }
    }

    async fn queued(&mut self, at: AttachedRoute, reply: &mut Reply) -> Next {
        let (request, target) = (Arc::clone(&self.request), Arc::clone(self.usage.target()));
        let on_top = request.context.router.response_timeout;
        loop {
            let stood_elsewhere = self.forget_left_nodes(&at.route);
            tokio::select! {
                // What has been told stands, also when the session has been attached anew since.
                biased;
                told = self.news(&at) => return self.told(told, at).await,
                end = ending(&request, reply, on_top) => return self.left(end),
                left = request.context.router.left(target.key(), &at) => return match left {
                    Ok(()) => Next::AskAgain,
                    Err(error) => Next::End(told(error)),
                },
                () = sleep(FORGET_EVERY), if stood_elsewhere => {}
            }
        }
    }

    /// Forgets nodes where it stood before, if they do not serve the lock any more and the session
    /// is not attached there: what was in the queue ends with the session. Otherwise they would be
    /// connected to again and again for as long as it waits here. Whether any are left.
    fn forget_left_nodes(&mut self, present: &Route) -> bool {
        let (router, key) = (&self.request.context.router, self.usage.target().key());
        self.routes.retain(|route| {
            let node = &route.node;
            route.is_at(&present.node) || node.is_attached() || router.is_home(node, key)
        });
        self.routes.len() > 1
    }

    /// Waits for news of the wait at this node. From one where it stood before, only a grant is
    /// news: that hold has gone along with the lock. Beside other holds of the owner the new wait
    /// would enter it once more than there are guards, so it is given back there.
    async fn news(&mut self, at: &AttachedRoute) -> Notification {
        loop {
            let told = self.permit.mailbox.next().await;
            let here = told.by == at.route.node.number;
            match told.kind {
                _ if here => return told,
                EventKind::Granted { .. } if self.usage.is_alone() => return told,
                EventKind::Granted { token } => self.give_back(token),
                EventKind::TimedOut { .. } | EventKind::Lost(_) | EventKind::Failed(_) => {}
            }
        }
    }

    async fn told(&mut self, told: Notification, at: AttachedRoute) -> Next {
        match told.kind {
            EventKind::Granted { token } => {
                let grant = self.told_grant(token, told.since, &at);
                // What was told before this was about an earlier one.
                self.usage.hears_of_grant();
                // Whoever asks from now on knows of it. Who is there already may have asked for
                // less since it began, for one of several locks.
                self.usage.target().promise(grant.lease);
                let here = told.by == at.route.node.number;
                if here && (grant.fresh || self.usage.is_alone()) {
                    self.granted(grant, &at).await
                } else {
                    self.confirmed(grant).await
                }
            }
            EventKind::TimedOut { lease_left } => refused(Error::not_acquired(lease_left)),
            EventKind::Failed(error) => {
                match self.request.context.router.redirected(&error, &at.route) {
                    Some(there) => self.sent_on(there, &at.route),
                    // The server did not keep the waiter, for it is no primary now or not ready.
                    None if error.is_unavailable() => Next::Pause(error),
                    None => refused(error),
                }
            }
            // See above: it is not told so.
            EventKind::Lost(_) => Next::AskAgain,
        }
    }

    fn told_grant(&self, token: u64, since: Instant, at: &AttachedRoute) -> Grant {
        let length = self.lease;
        Grant {
            token,
            lease: Lease { since, length },
            attachment: Arc::clone(&at.attachment),
            // Who holds a lock does not wait for it; but one of several may be held.
            fresh: self.usage.target().mode() != Mode::Several,
        }
    }

    /// A grant is old by the time we know of it: the news may have lain in the socket while this
    /// process was stopped. If that leaves too little, a renewal gives a new start to count from.
    async fn granted(&self, grant: Grant, at: &AttachedRoute) -> Next {
        if at.is_fresh(grant.lease) && !self.usage.may_have_been_released() {
            return Next::End(Outcome::Granted(grant));
        }
        self.confirmed(grant).await
    }

    async fn confirmed(&self, grant: Grant) -> Next {
        let context = &self.request.context;
        let Some(at) = context.router.attached(self.usage.target().key()) else {
            self.give_up(grant.token);
            return Next::AskAgain;
        };
        let target = self.usage.target();
        let lease = |now| self.usage.lease(now);
        let renewed = renew::ask(&context.router, target, grant.token, Aim::Hold, lease);
        match renewed.await {
            Ok(told) if told.held => {
                let attachment = at.attachment;
                let grant = Grant {
                    attachment,
                    ..grant
                };
                Next::End(Outcome::Granted(grant.renewed(told.renewal)))
            }
            // Granted, and run out or released by mistake before we knew: join the queue again.
            Ok(_) => {
                release::remains(context, &self.usage, grant.token);
                Next::Pause(Error::not_acquired(None))
            }
            Err(error) => {
                self.give_up(grant.token);
                Next::Pause(error)
            }
        }
    }

    /// The grant cannot be confirmed, and is asked for again. With ONCE that finds it; without, it
    /// would be entered once more than there are guards.
    fn give_up(&self, token: u64) {
        if !self.usage.is_alone() {
            self.give_back(token);
        }
    }

    fn failed(&mut self, error: Error, route: &Route) -> Next {
        if let Some(there) = self.request.context.router.redirected(&error, route) {
            return self.sent_on(there, route);
        }
        if error.is_no_session() {
            return Next::AskAgain;
        }
        // An earlier wait of this owner that could not be called back, or this one: it is our turn.
        if error.is_waiting() && self.recall == Recall::BesideOthers {
            self.recall = Recall::Always;
            return Next::Pause(Error::not_acquired(Some(Duration::ZERO)));
        }
        // With ONCE the next ACQUIRE takes over what this one may have left behind.
        let passing = error.is_unavailable() || error.is_unknown() && self.usage.is_alone();
        let there =
            self.queued || error.is_try_again() && self.request.context.router.are_several();
        let left_behind = self.queued || self.unheard || error.is_unknown();
        if passing && (there || error.is_broken_connection()) {
            self.unheard |= error.is_unknown();
            return Next::Pause(error);
        }
        if left_behind {
            return Next::End(told(error));
        }
        refused(error)
    }

    /// What was in the queue here has left it, or soon will: the lock is elsewhere.
    fn sent_on(&mut self, there: Route, from: &Route) -> Next {
        self.routes.retain(|route| !route.is_at(&from.node));
        Next::AskThere(there)
    }

    fn left(&mut self, end: Ending) -> Next {
        // In line, or under way to it: what the server has made of it nobody has heard.
        self.last = Error::no_reply(None);
        Next::End(Outcome::Ended(end))
    }

    /// Takes the waiter out of the line and gives back what it may have been granted meanwhile.
    ///
    /// The CANCEL goes the way of the ACQUIRE, behind it: when it is carried out there is a waiter,
    /// a hold, or nothing, and nothing comes after it. An owner minted for this call then releases
    /// whatever it has. Another may have holds of its own: there only a grant that is told is given
    /// back, by the answer or by its event.
    ///
    /// As long as the session lives, so may the waiter: so this is tried until it is answered. For
    /// a while the client's shutdown waits for it, and after that only the client's end is its own.
    async fn withdraw(mut self) {
        let Some(last) = self.routes.last().cloned() else {
            return;
        };
        let mut way_out = WayOut {
            last,
            cancelled_at: Vec::new(),
            backoff: Backoff::new(),
        };
        let started = Instant::now();
        while !self.call_back(&mut way_out).await {
            if started.elapsed() >= WITHDRAW_FOR.min(self.usage.options().lease) {
                let request = Arc::clone(&self.request);
                return request.context.background.owe(self.withdraw_later(way_out));
            }
            sleep(way_out.backoff.next()).await;
        }
        self.take_all_back(way_out.cancelled_at).await;
    }

    async fn withdraw_later(mut self, mut way_out: WayOut) {
        while !self.call_back(&mut way_out).await {
            let session = &way_out.last.node.session;
            let known = session.attachment();
            let anew = async {
                if session.next_attachment(known.as_ref()).await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            let _ = timeout(WITHDRAW_EVERY, anew).await;
            // Without the client there is no session.
            let context = &self.request.context;
            if Arc::strong_count(context) <= context.background.owed() {
                return;
            }
        }
        self.take_all_back(way_out.cancelled_at).await;
    }

    /// Whether the waiter is known to be out of line wherever it may stand.
    async fn call_back(&mut self, way_out: &mut WayOut) -> bool {
        let target = Arc::clone(self.usage.target());
        let cancel = |route: &Route| route.send(request::cancel(target.subject()));
        let cancels: Vec<_> = self
            .routes
            .iter()
            .map(|route| (route.clone(), cancel(route)))
            .collect();
        let release = request::release(target.subject(), None, None);
        let release = self.request.own.then(|| way_out.last.send(release));
        for (route, cancel) in cancels {
            let cancelled = cancel.await;
            let error = cancelled.as_ref().err();
            let answers = error.is_none_or(|error| Redirect::of(error).is_some());
            if self.is_rid_of_us(cancelled, &route) {
                // One that is gone has nothing more to tell.
                let node = answers.then(|| Arc::clone(&route.node));
                way_out.cancelled_at.extend(node);
                self.routes.retain(|other| !other.is_at(&route.node));
            }
        }
        let Some(release) = release else {
            return self.routes.is_empty();
        };
        match release.await {
            Ok(_) => self.routes.is_empty(),
            Err(error) => {
                let router = &self.request.context.router;
                let there = router.redirected(&error, &way_out.last);
                way_out.last = there.unwrap_or_else(|| router.route(target.key()));
                false
            }
        }
    }

    /// The waiter is out of line, and was called back at these nodes: gives back what it may have
    /// been granted before.
    async fn take_all_back(mut self, nodes: Vec<Arc<Node>>) {
        if self.request.own || self.take_back_answered(nodes).await {
            return;
        }
        let key = self.usage.target().key();
        if let Some(at) = self.request.context.router.attached(key) {
            // Where it cannot be asked, what is left ends with its lease.
            let _ = self.undo_unheard_grant(&at).await;
        }
        // It may have been granted, and the word of it lost. Sent while it is still our turn, so
        // that it takes nothing from the owner's next wait.
        let Wait {
            request,
            usage,
            permit,
            ..
        } = self;
        release::in_background(&request.context, usage, None);
        drop(permit);
    }

    /// Whether nothing is in the queue there any more: it was cancelled, or the lock is elsewhere.
    /// A node that cannot be reached, and whose slots another has taken over, ends our session.
    fn is_rid_of_us(&self, cancelled: Result<u64, Error>, route: &Route) -> bool {
        let router = &self.request.context.router;
        match cancelled {
            Ok(_) => true,
            Err(error) if router.redirected(&error, route).is_some() => true,
            Err(_) => {
                router.are_several() && !route.is_at(&router.route(self.usage.target().key()).node)
            }
        }
    }

    /// The waiter has left the line, if ever it was there: the answer says it, which has come
    /// before that to the CANCEL. Returns whether all was heard that there was to hear.
    async fn take_back_answered(&mut self, nodes: Vec<Arc<Node>>) -> bool {
        let answer = match self.unanswered.take() {
            Some(answer) => answer.await,
            None => Ok(Acquired::Queued),
        };
        match answer {
            Ok(Acquired::Granted { token, .. }) => self.give_back(token),
            Ok(Acquired::Queued) => return self.take_back(nodes).await,
            Err(error) if error.is_unknown() => return self.take_back(nodes).await,
            Ok(Acquired::NotHeld { .. }) | Err(_) => {}
        }
        true
    }

    /// The waiter has left the line at these nodes: hears why, and gives back what it was granted.
    /// Left unheard, the news of this wait would be taken for that of the owner's next one here;
    /// and of a grant that comes when nobody listens any more, only the first of several locks
    /// would be known.
    ///
    /// So it listens until each node has told of it, or has nothing to tell; at most for a lease,
    /// after which there is nothing to give back. Returns whether each has told: of a wait that was
    /// in the queue every node does, but that may be lost with the session connection.
    async fn take_back(&mut self, mut silent: Vec<Arc<Node>>) -> bool {
        let left = Instant::now();
        let over = sleep(self.lease);
        tokio::pin!(over);
        while !silent.is_empty() {
            let all_told = async {
                for node in &silent {
                    node.session.all_told(left).await;
                }
            };
            let told = tokio::select! {
                biased;
                told = self.permit.mailbox.next() => Some(told),
                // It may have been told between the two looks.
                () = all_told => self.permit.mailbox.here(),
                () = &mut over => return true,
            };
            let Some(told) = told else { return false };
            if let EventKind::Granted { token } = told.kind {
                self.give_back(token);
            }
            silent.retain(|node| node.number != told.by);
        }
        true
    }

    /// As if it had been held, and dropped; but nobody counts on it.
    fn give_back(&self, token: u64) {
        let (context, since) = (&self.request.context, Instant::now());
        let usage = self.usage.target().claim(self.usage.options());
        let grant = Grant {
            token,
            lease: Lease {
                since,
                length: usage.options().lease,
            },
            attachment: Attachment::new(since, Duration::ZERO),
            fresh: false,
        };
        let hold = Hold::new(&usage, grant);
        release::in_background(context, usage, Some(hold));
    }
}

/// Whether asking again may help.
fn is_passing(error: &Error) -> bool {
    error.is_unavailable() || error.is_unknown()
}

fn refused(error: Error) -> Next {
    Next::End(Outcome::Refused(error))
}

/// The caller hears why the wait ends; the server has yet to hear it.
fn told(error: Error) -> Outcome {
    Outcome::Ended(Ending::Notification(error))
}

/// Why a caller waits no more.
enum Ending {
    Dropped,
    ShutDown,
    TimedOut,
    /// It was told why.
    Notification(Error),
}

impl Ending {
    /// `last` is what a caller is told whose time is up.
    fn tell(self, reply: Reply, last: Error) {
        let error = match self {
            Self::Dropped => return,
            Self::ShutDown => Error::shut_down(),
            Self::TimedOut => last,
            Self::Notification(error) => error,
        };
        // If the caller has gone in this very moment there is nobody to tell.
        let _ = reply.send(Err(error));
    }
}

/// Ends when the caller waits no more: it is gone, the client shuts down, or its time is up and
/// `on_top` of it.
async fn ending(request: &Request, reply: &mut Reply, on_top: Duration) -> Ending {
    let deadline = match request.wait_mode {
        WaitMode::None => Some(Instant::now()),
        WaitMode::Until(deadline) => deadline.checked_add(on_top),
        WaitMode::Forever => None,
    };
    let time_up = async {
        match deadline {
            Some(deadline) => sleep_until(deadline).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = reply.closed() => Ending::Dropped,
        () = request.context.background.closed() => Ending::ShutDown,
        () = time_up => Ending::TimedOut,
    }
}

/// So often a wait looks whether there is still something of it at the nodes where it stood before.
const FORGET_EVERY: Duration = Duration::from_secs(2);

/// For so long the client's shutdown waits until a waiter has been called back.
const WITHDRAW_FOR: Duration = Duration::from_secs(30);

/// After that it is tried so often, and whenever the session is attached anew.
const WITHDRAW_EVERY: Duration = Duration::from_secs(5);
