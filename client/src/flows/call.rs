//! A call that takes a lock, as a state machine. Asking once and waiting in the queue are the same,
//! but that only a call with the owner's permit asks for a place in the queue, and so only that is
//! ever queued.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::flows::{
    Aim, Asked, Context, Held, Permits, QueuePermit, Reply, Request, release, renew,
};
use crate::ledger::{Grant, Notification, Usage};
use crate::topology::{AttachedRoute, MAX_REDIRECTS, Route};
use crate::wire::{Acquired, Attachment, EventKind, Mode, WaitMode};
use crate::{Backoff, Error, Lease, LostReason, TIMEOUT_MAX};

/// Where a call is.
pub(super) enum State {
    /// Nothing is under way. It is asked for where the lock is, as soon as the session is attached
    /// there; if it was asked for under an attachment that is over, by another one.
    Ask(Option<Arc<Attachment>>),
    /// A node has sent us on, and it is asked for there.
    AskThere(Route),
    /// The same, or as at first, after a pause: the connection or the server went away, or is not
    /// ready; or nodes keep sending us on.
    Pause(Option<Route>),
    /// An ACQUIRE was sent. If the call ends here, the answer still says what to give back.
    Asked(Asked),
    /// The waiter is in the queue, under this attachment, and an event will tell of its end.
    Queued(AttachedRoute),
    /// It was granted, and that cannot be counted on without another word: it was heard late, or
    /// from another node, or a RELEASE that names no token may have come between.
    Confirm(Grant),
    /// Another call of the owner has the permit, and the lock is taken.
    InTurn,
    Granted(Grant),
    /// The caller hears the last error.
    Failed,
}

/// A call that goes on in the background.
pub(super) struct Call {
    pub(super) request: Request,
    pub(super) usage: Usage,
    pub(super) permit: Option<QueuePermit>,
    /// When the caller's time is up: that of one who does not wait at the start.
    deadline: Instant,
    /// What the caller is told if its time is up while nothing is under way.
    last: Error,
    /// The lease that was last asked for, and the number of the ACQUIRE.
    pub(super) lease: Duration,
    asked: u64,
    /// Where something of it may be: where it was asked for last, and before that if nobody has
    /// said since that the lock is not there any more.
    pub(super) routes: Vec<Route>,
    /// How often in a row it was sent on.
    hops: u32,
    backoff: Backoff,
    /// Whether the server has taken it in. Before that a lost server ends the call; after it the
    /// wait goes on until the server is back.
    pub(super) queued: bool,
    /// Whether an ACQUIRE was sent of which nobody knows what has come of it.
    pub(super) unheard: bool,
    /// Whether what is told of its end may be about an earlier ACQUIRE than the last.
    is_again: bool,
    pub(super) recall: Recall,
}

/// Whether what may be in the queue is called back before the lock is asked for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Recall {
    /// Beside other calls of the owner: for those ONCE is not sent.
    BesideOthers,
    /// Always: something was there that ONCE does not take over.
    Always,
    /// The same, and of an earlier CANCEL nobody knows what has come of it: its event may follow.
    Unheard,
}

impl Call {
    pub(super) fn new(
        request: Request,
        usage: Usage,
        permit: Option<QueuePermit>,
        state: &State,
    ) -> Self {
        let (lease, asked, routes) = match state {
            State::Asked(Asked { lease, at, .. }) => {
                (lease.lease, lease.number, vec![at.route.clone()])
            }
            _ => (usage.options.lease_from(Instant::now()), 0, Vec::new()),
        };
        let began = lease.since;
        Self {
            deadline: match request.wait_mode {
                WaitMode::None => began,
                WaitMode::Until(deadline) => deadline,
                WaitMode::Forever => began.checked_add(TIMEOUT_MAX).unwrap_or(began),
            },
            lease: lease.length,
            asked,
            queued: request.waited.is_some_and(|waited| waited.was_held_up),
            request,
            usage,
            permit,
            last: Error::not_attached(),
            routes,
            hops: 0,
            backoff: Backoff::new(),
            unheard: false,
            is_again: false,
            recall: Recall::BesideOthers,
        }
    }

    /// Goes from state to state until the call has ended, and tells the caller. Whatever a state
    /// waits for, the caller's time is watched meanwhile; what is left then is of no concern to it.
    pub(super) async fn run(mut self, mut state: State, mut reply: Reply) {
        let context = Arc::clone(&self.request.context);
        loop {
            state = match state {
                State::Granted(grant) => return self.deliver(grant, reply).await,
                State::Failed => break,
                State::InTurn => {
                    let next;
                    (self, next) = self.in_turn(&mut reply).await;
                    next
                }
                mut present => {
                    let deadline = self.time_up(&present);
                    let in_line = self.permit.is_some();
                    tokio::select! {
                        biased;
                        next = self.step(&mut present) => next,
                        end = ended(&context, &mut reply, in_line, deadline) => {
                            self.last = end.unwrap_or_else(|| self.late(&present));
                            state = present;
                            break;
                        }
                    }
                }
            };
        }
        self.permit.as_mut().map(QueuePermit::ends);
        // If the caller has gone there is nobody to tell.
        let _ = reply.send(Err(self.last.clone()));
        if let Some(kept) = &self.request.kept {
            kept.is_away(&context);
        }
        // What the server may know of the call is undone. For a while the client's shutdown waits
        // for that, and after that only the client's end is its own.
        let limit = WITHDRAW_FOR.min(self.usage.options.lease);
        let mut withdrawal = Box::pin(self.withdraw(state));
        if timeout(limit, &mut withdrawal).await.is_err() {
            context.background.owe(withdrawal);
        }
    }

    /// What comes after a state. If the caller ends it before, the state says what is under way.
    async fn step(&mut self, state: &mut State) -> State {
        match self.permit.as_ref().map(|permit| permit.span.clone()) {
            Some(span) => span.around(self.next(state)).await,
            None => self.next(state).await,
        }
    }

    async fn next(&mut self, state: &mut State) -> State {
        match state {
            State::Ask(known) => self.ask(known.as_ref(), None).await,
            State::AskThere(there) => self.ask(None, Some(there)).await,
            State::Pause(there) => {
                sleep(self.backoff.next()).await;
                there.take().map_or(State::Ask(None), State::AskThere)
            }
            State::Asked(asked) => self.hear(asked).await,
            State::Queued(at) => self.stay(at).await,
            State::Confirm(grant) => self.confirm(grant).await,
            State::InTurn | State::Granted(_) | State::Failed => std::future::pending().await,
        }
    }

    /// Until when the caller waits in this state. The server ends a wait in the queue itself; the
    /// time on top is for its answer to arrive. The same time is for the connection of a call that
    /// does not wait in the queue.
    fn time_up(&self, state: &State) -> Instant {
        let in_line = self.permit.is_some();
        let on_top = match state {
            State::Ask(_) | State::AskThere(_) | State::Pause(_) if in_line => Duration::ZERO,
            _ => self.request.context.router.response_timeout,
        };
        self.deadline.checked_add(on_top).unwrap_or(self.deadline)
    }

    /// What the caller hears if its time is up now.
    fn late(&self, state: &State) -> Error {
        let key = self.usage.target.key();
        let node = self.request.context.router.route(key).node;
        match state {
            State::Asked(_) | State::Queued(_) | State::Confirm(_) => Error::no_reply(None),
            _ if self.permit.is_some() || node.is_attached() => self.last.clone(),
            _ => prefer_unknown(self.last.clone(), node.session.trouble()),
        }
    }

    /// Brings the caller what it is granted. What nobody takes is dropped, and so given back.
    async fn deliver(self, grant: Grant, mut reply: Reply) {
        let held = Held::new(&self.request.context, self.usage, grant);
        // While the hold is known here, so that the same grant told twice is not taken for another.
        drop(self.permit);
        if self.request.passing {
            let _ = reply.send(Ok(held));
            return;
        }
        if let Some(kept) = &self.request.kept {
            kept.is_granted(&held.hold);
        }
        let result = tokio::select! {
            result = held.acknowledged() => result,
            () = reply.closed() => return,
        };
        let has_failed = result.is_err();
        let _ = reply.send(result);
        if let Some(kept) = self.request.kept.as_ref().filter(|_| has_failed) {
            kept.is_away(&self.request.context);
        }
    }

    /// Waits until the owner has left the queue. The usage ends here: until its turn comes, the
    /// owner has nothing at the lock.
    async fn in_turn(self, reply: &mut Reply) -> (Self, State) {
        let (request, last) = (self.request, self.last);
        drop(self.usage);
        let permits = async {
            let mut permits = Permits::new();
            for permit in request.target.permits() {
                permits.push(permit.lock_owned().await);
            }
            permits
        };
        let (permits, last, next) = tokio::select! {
            permits = permits => (Some(permits), last, State::Ask(None)),
            end = ended(&request.context, reply, true, self.deadline) => {
                (None, end.unwrap_or(last), State::Failed)
            }
        };
        let usage = request.target.claim(request.options);
        let permit = permits.map(|permits| QueuePermit::new(&request, &usage, permits));
        let call = Self::new(request, usage, permit, &next);
        (Self { last, ..call }, next)
    }

    /// Asks where a node has sent us; or where the lock is, under an attachment other than `known`,
    /// as soon as there is one.
    async fn ask(&mut self, known: Option<&Arc<Attachment>>, there: Option<&Route>) -> State {
        let (router, key) = (&self.request.context.router, self.usage.target.key());
        let next = match there {
            None if self.queued => router.attached_at(|| router.route(key), known).await,
            _ => router.next_within(key, known, there.cloned()).await,
        };
        let at = match next {
            Ok(at) => at,
            Err(error) if self.queued && error.is_unavailable() => return self.pause(error),
            Err(error) => return self.failed(error),
        };
        let cleared = match self.recall(&at).await {
            Ok(()) if self.queued => self.undo_unheard_grant(&at).await,
            recalled => recalled,
        };
        if let Err(error) = cleared {
            return self.pause(error);
        }
        self.is_again = !self.routes.is_empty();
        self.begin(&at.route);
        let asked = Asked::send(&self.request, &self.usage, self.permit.as_mut(), at);
        (self.lease, self.asked) = (asked.lease.lease.length, asked.lease.number);
        State::Asked(asked)
    }

    /// From now on something of it may be there; the last of the routes is the present one.
    pub(super) fn begin(&mut self, route: &Route) {
        self.routes.retain(|other| !other.is_at(&route.node));
        self.routes.push(route.clone());
    }

    /// Waits for the answer. The event of the grant may overtake it; but only with ONCE it does not
    /// matter which ACQUIRE of this call it is about. Another end may be that of an earlier one:
    /// what the last was granted would be left behind.
    async fn hear(&mut self, asked: &mut Asked) -> State {
        let (at, is_once) = (asked.at.clone(), asked.lease.is_alone);
        let mut ended = None;
        let answer = loop {
            tokio::select! {
                answer = &mut asked.answer => break answer,
                told = self.news(&at), if is_once && ended.is_none() => {
                    if !self.is_again || matches!(told.kind, EventKind::Granted { .. }) {
                        return self.told(told, &at);
                    }
                    ended = Some(told);
                }
            }
        };
        let heard = match (answer, ended) {
            (Ok(heard), None) => heard,
            (Ok(heard), Some(_)) if !matches!(heard.acquired, Acquired::Queued) => heard,
            (_, Some(told)) => return self.told(told, &at),
            (Err(error), None) => return self.unanswered(error, &at),
        };
        match heard.acquired {
            Acquired::Granted { token, count } => {
                self.learnt(token, &at);
                // Without ONCE a grant of which no word has come was entered once more.
                // Of several the highest count is told, and not of which.
                let names_one = self.usage.target.names.len() == 1;
                let may_be_twice = names_one && !is_once && (self.queued || self.unheard);
                if may_be_twice && count > heard.most {
                    self.give_back(token, Instant::now());
                }
                (self.usage.begun, self.usage.is_next) = (asked.lease.number, heard.is_next);
                let (lease, fresh) = (asked.lease.counted(), count == 1);
                self.granted(token, lease, (fresh, true), &at)
            }
            Acquired::NotHeld { lease_left } => {
                let next = self.refused(Error::not_acquired(lease_left));
                let waits = !matches!(self.request.wait_mode, WaitMode::None);
                let in_turn = waits && self.permit.is_none();
                if in_turn { State::InTurn } else { next }
            }
            Acquired::Queued if self.permit.is_some() => {
                (self.queued, self.hops) = (true, 0);
                self.last = Error::not_attached();
                if let Some(kept) = &self.request.kept {
                    kept.is_away(&self.request.context);
                }
                State::Queued(at)
            }
            Acquired::Queued => self.failed(Error::no_reply(None)),
        }
    }

    /// In the queue, until an event says how that ended, or the lock has to be asked for again: the
    /// session is attached anew, or the lock is elsewhere.
    async fn stay(&mut self, at: &AttachedRoute) -> State {
        let context = Arc::clone(&self.request.context);
        let target = Arc::clone(&self.usage.target);
        loop {
            let stood_elsewhere = self.forget_left_nodes(&at.route);
            tokio::select! {
                // What has been told stands, also when the session has been attached anew since.
                biased;
                told = self.news(at) => return self.told(told, at),
                left = context.router.left(target.key(), at) => return match left {
                    Ok(()) => State::Ask(Some(Arc::clone(&at.attachment))),
                    Err(error) => self.failed(error),
                },
                () = sleep(FORGET_EVERY), if stood_elsewhere => {}
            }
        }
    }

    /// Forgets nodes where it stood before, if they do not serve the lock any more and the session
    /// is not attached there: what was in the queue ends with the session. Otherwise they would be
    /// connected to again and again for as long as it waits here. Whether any are left.
    fn forget_left_nodes(&mut self, present: &Route) -> bool {
        let (router, key) = (&self.request.context.router, self.usage.target.key());
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
            // Who does not wait in the queue hears nothing.
            let Some(permit) = &self.permit else {
                return std::future::pending().await;
            };
            let told = permit.mailbox.next().await;
            let here = told.by == at.route.node.session.number;
            match told.kind {
                _ if here => return told,
                EventKind::Granted { .. } if self.usage.target.is_alone() => return told,
                EventKind::Granted { token } => self.give_back(token, told.since),
                _ => {}
            }
        }
    }

    fn told(&mut self, told: Notification, at: &AttachedRoute) -> State {
        match told.kind {
            EventKind::Granted { token } => {
                // What was added is for the sake of others, who have it already.
                let (since, length) = (told.since, self.lease.min(self.usage.options.lease));
                // Who holds a lock does not wait for it; but one of several may be held.
                let fresh = self.usage.target.mode != Mode::Several;
                self.usage.target.counted(1, token);
                // What was told before this was about an earlier one.
                self.usage.granted = told.number;
                let here = told.by == at.route.node.session.number;
                // It was asked for when the wait began, and maybe with what was left of a hold that
                // is over by now.
                let is_whole = length >= self.usage.options.lease;
                // From now on nobody asks for less. Somebody may have before.
                self.usage.target.promise(Lease { since, length });
                let is_left = !self.usage.may_have_been_cut(self.asked);
                let is_sure =
                    here && is_whole && is_left && (fresh || self.usage.target.is_alone());
                self.granted(token, Lease { since, length }, (fresh, is_sure), at)
            }
            EventKind::TimedOut { lease_left } if self.is_again => {
                self.failed(Error::not_acquired(lease_left))
            }
            EventKind::TimedOut { lease_left } => self.refused(Error::not_acquired(lease_left)),
            EventKind::Failed(error) => {
                // The server took it in, and did not keep it.
                self.queued = true;
                if !self.is_again {
                    self.routes.pop();
                }
                self.unanswered(error, at)
            }
            // See above: it is not told so.
            EventKind::Lost(_) | EventKind::Wanted => State::Ask(Some(Arc::clone(&at.attachment))),
        }
    }

    /// An answer has told of a grant: an event may tell of it once more, and late.
    pub(super) fn learnt(&mut self, token: u64, at: &AttachedRoute) {
        if let Some(permit) = self.permit.as_mut().filter(|_| self.queued || self.unheard) {
            permit.mailbox.learnt(&at.route.node.session, token);
        }
    }

    /// A grant may be old by the time we know of it: the news may have lain in the socket while
    /// this process was stopped. If that leaves too little, a renewal gives a new start to count
    /// from.
    fn granted(
        &self,
        token: u64,
        lease: Lease,
        (fresh, is_sure): (bool, bool),
        at: &AttachedRoute,
    ) -> State {
        // Whoever asks from now on knows of it. Who is there already may have asked for less since
        // it began, for one of several locks.
        self.usage.target.promise(lease);
        let grant = Grant::new(token, lease, Arc::clone(&at.attachment), fresh);
        if is_sure && at.is_fresh(lease) && !self.usage.may_have_been_released() {
            State::Granted(grant)
        } else {
            State::Confirm(grant)
        }
    }

    /// Has the grant renewed. Where that does not work it is asked for again: with ONCE that finds
    /// it; without, it would be entered once more than there are guards, so it is given back.
    async fn confirm(&mut self, grant: &Grant) -> State {
        let (context, target) = (&self.request.context, &self.usage.target);
        // Where no token tells holds apart, the server says that there is one, and not how many:
        // if a RELEASE has taken one of two grants, both would be told that they are held.
        let is_unnamed = !target.mode.has_token() && !target.is_alone();
        let is_ambiguous = is_unnamed && self.usage.may_have_been_released();
        // Heard when its lease was over, because we stood still: what is held there by now may be
        // what another call of this owner was granted since.
        if is_unnamed && grant.lease.ends() <= Instant::now() {
            return self.ran_out(grant);
        }
        let lease = |now| self.usage.lease(now);
        let aim = (Aim::Hold, self.request.kept.is_some());
        let renewed = renew::ask(&context.router, target, grant.token, aim, lease).await;
        let error = match renewed {
            Ok(told) if !told.held => return self.ran_out(grant),
            Ok(told) => match told.attachment {
                Some(attachment) if !is_ambiguous => {
                    let (lease, fresh) = (told.lease, grant.fresh);
                    return State::Granted(Grant::new(grant.token, lease, attachment, fresh));
                }
                // Nothing is broken: it is given back, and asked for again. Not left for ONCE to
                // take over: alone now, it may be beside others when that is sent.
                Some(_) => {
                    self.give_back(grant.token, Instant::now());
                    return self.pause(Error::not_acquired(Some(Duration::ZERO)));
                }
                None => Error::not_attached(),
            },
            Err(error) => error,
        };
        if !self.usage.target.is_alone() {
            self.give_back(grant.token, Instant::now());
        }
        // By the next ACQUIRE it may be held without our knowing, and no longer alone.
        self.unheard = true;
        self.pause(error)
    }

    /// It was granted, and has run out or was released by mistake before we knew.
    fn ran_out(&mut self, grant: &Grant) -> State {
        // What was entered again has another token, and ends with its lease.
        release::remains(&self.request.context, &self.usage, |_| grant.token);
        match self.permit {
            Some(_) => self.pause(Error::not_acquired(Some(Duration::ZERO))),
            None => self.refused(Error::lost(LostReason::NotHeld)),
        }
    }

    /// The ACQUIRE was refused, or nobody knows what has come of it.
    fn unanswered(&mut self, error: Error, at: &AttachedRoute) -> State {
        let router = &self.request.context.router;
        if let Some(there) = router.redirected(&error, &at.route) {
            // What was in the queue here has left it, or soon will: the lock is elsewhere.
            self.routes.retain(|route| !route.is_at(&at.route.node));
            self.last = prefer_unknown(self.last.clone(), error.misdirected());
            self.hops = self.hops.saturating_add(1);
            // Two nodes that have not yet heard of a move send us to each other.
            if self.hops > MAX_REDIRECTS {
                return State::Pause(Some(there));
            }
            return State::AskThere(there);
        }
        // The session may be right where it is, and the commands yet to follow: another attachment
        // may never come.
        if error.is_elsewhere() {
            return self.pause(error);
        }
        if error.has_code("NOSESSION") {
            return State::Ask(Some(Arc::clone(&at.attachment)));
        }
        // An earlier wait of this owner that could not be called back, or this one: it is our turn.
        if error.has_code("WAITING") && self.recall == Recall::BesideOthers {
            self.recall = Recall::Always;
            return self.pause(Error::not_acquired(Some(Duration::ZERO)));
        }
        // With ONCE the next ACQUIRE takes over what this one may have left behind.
        let passing = error.is_unavailable() || error.is_unknown() && self.usage.target.is_alone();
        let again = self.queued
            || error.is_try_again() && router.are_several()
            // Who does not wait in the queue tries twice.
            || error.is_broken_connection() && (self.permit.is_some() || !self.unheard);
        let left_behind = self.queued || self.unheard || error.is_unknown();
        self.unheard |= error.is_unknown();
        if passing && again {
            self.pause(error)
        } else if left_behind {
            self.failed(error)
        } else {
            self.refused(error)
        }
    }

    /// The connection or the server went away, or is not ready: asks again after a pause.
    pub(super) fn pause(&mut self, error: Error) -> State {
        self.last = prefer_unknown(self.last.clone(), error);
        State::Pause(None)
    }

    /// The caller hears why; the server may not know that yet.
    fn failed(&mut self, error: Error) -> State {
        self.last = prefer_unknown(self.last.clone(), error);
        State::Failed
    }

    /// The same by the server's word: where it was asked for last nothing is left.
    fn refused(&mut self, error: Error) -> State {
        self.routes.pop();
        self.failed(error)
    }
}

/// Ends when the caller waits no more: its time is up, for which there is no error here; or, if it
/// waits in the queue, it is gone or the client shuts down. One that only asks hears the answer,
/// and what it is granted and nobody takes is given back.
async fn ended(context: &Context, reply: &mut Reply, waits: bool, until: Instant) -> Option<Error> {
    tokio::select! {
        () = reply.closed(), if waits => Some(Error::shut_down()),
        () = context.background.closing.cancelled(), if waits => Some(Error::shut_down()),
        () = sleep_until(until) => None,
    }
}

/// Of two errors the one that leaves more open: that a later try was refused says nothing about
/// an earlier one, whose reply was lost.
fn prefer_unknown(first: Error, second: Error) -> Error {
    let is_known_less = first.is_unknown() && second.is_unavailable();
    if is_known_less { first } else { second }
}

/// So often a wait looks whether there is still something of it at the nodes where it stood before.
const FORGET_EVERY: Duration = Duration::from_secs(2);

/// For so long the client's shutdown waits until a waiter has been called back.
const WITHDRAW_FOR: Duration = Duration::from_secs(30);
