//! A call of `lock()` or its siblings: it asks the server, and waits in its queue. The caller may
//! be dropped at any moment; the call is undone then.

use std::sync::{Arc, Weak};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, sleep, sleep_until};

use crate::error::{Code, Error};
use crate::locks::table::Turn;
use crate::locks::turns::{Begun, Turns};
use crate::locks::{
    Aim, Call, CallId, Context, CountsOn, Grant, Held, Helds, Hold, Phase, Request, State, keep,
    renew,
};
use crate::time::MILLI;
use crate::topology::{Node, Route};
use crate::wire::reply::{read_acquired, read_by};
use crate::wire::{Acquired, Event, Manner, Outcome, Sending, Session, WaitMode, What, request};
use crate::{metrics, task, wire};

/// Takes the locks that the request names.
pub(crate) async fn acquire(context: &Arc<Context>, request: Request) -> Result<Helds, Error> {
    check(context, &request)?;
    let (since, waits) = (Instant::now(), request.wait_mode.waits());
    let mut turns = Turns::new(context, request);
    let begun = match turns.take().await {
        Ok(()) => turns.begin().await,
        Err(error) => Err(error),
    };
    let has_asked = matches!(begun, Ok(Begun::Asked(_)));
    let span = turns.request.span();
    let helds = match begun {
        Ok(Begun::Asked(mut pending)) => pending.answer(since).await,
        Ok(Begun::Held(helds)) => Ok(helds),
        Err(error) => Err(error),
    };
    if !has_asked {
        // Without this, a task that does nothing else would starve the others of its thread.
        consume_budget().await;
    }
    if waits && (has_asked || turns.has_waited) {
        span.waited(since);
        metrics::waited(since);
    }
    // The next call of this owner begins only after this one is acknowledged.
    acknowledged(context, helds?).await
}

async fn acknowledged(context: &Arc<Context>, helds: Helds) -> Result<Helds, Error> {
    if context.router.acknowledges() {
        return Box::pin(async {
            for held in &helds {
                let renewed = renew::ask(&held.context, &held.hold, Aim::Lease).await;
                renewed.map_err(Error::unacknowledged)?;
            }
            Ok(helds)
        })
        .await;
    }
    Ok(helds)
}

fn check(context: &Context, request: &Request) -> Result<(), Error> {
    // Two clients that share an owner would each think that it is alone.
    if !request.owner.is_of(&context.settings.id) {
        return Err(Error::refused("the owner belongs to another client"));
    }
    if context.background.closing.is_cancelled() {
        return Err(Error::shut_down());
    }
    Ok(())
}

/// A caller who listens. When it goes, the call is undone.
pub(super) struct Pending {
    context: Arc<Context>,
    wait_mode: WaitMode,
    id: CallId,
    answer: oneshot::Receiver<Result<Helds, Error>>,
}

impl Pending {
    pub(super) fn new(
        context: Arc<Context>,
        wait_mode: WaitMode,
        id: CallId,
        answer: oneshot::Receiver<Result<Helds, Error>>,
    ) -> Self {
        Self {
            context,
            wait_mode,
            id,
            answer,
        }
    }

    pub(super) fn ask(&self) {
        self.context.ask(self.id, None);
    }

    /// The server's own word comes first; without one the call ends a response timeout after its
    /// time is up, however often it had to ask.
    async fn answer(&mut self, since: Instant) -> Result<Helds, Error> {
        let background = &self.context.background;
        let timeout = self.context.router.response_timeout;
        let limit = match self.wait_mode {
            // The link's own timeout covers a single command.
            WaitMode::None => since.checked_add(timeout.saturating_add(LINK_FIRST)),
            WaitMode::Until(deadline) => deadline.checked_add(timeout),
            WaitMode::Forever => None,
        };
        tokio::select! {
            biased;
            answer = &mut self.answer => answer.unwrap_or_else(|_| Err(Error::shut_down())),
            () = background.closing.cancelled(), if self.wait_mode.waits() => {
                Err(Error::shut_down())
            }
            () = sleep_until(limit.unwrap_or(since)), if limit.is_some() => Err(self.no_answer()),
        }
    }

    /// The time is up, and the server's own word has not come.
    fn no_answer(&self) -> Error {
        let may_be_held = self.context.table.with(|state| {
            let call = state.call(self.id);
            call.is_none_or(|call| call.was_queued || matches!(call.phase, Phase::Asking))
        });
        if may_be_held {
            return Error::no_reply(None);
        }
        // The server refused all commands that were sent, and the reason has not passed.
        let trouble = self.context.router.trouble();
        trouble.unwrap_or_else(Error::not_attached)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        let call = self.context.table.with(|state| state.end(self.id));
        if let Some(call) = call {
            self.context.undo(call);
        }
    }
}

/// The next step after an answer or an event. It is taken after the table's mutex is released.
pub(super) enum Next {
    Nothing,
    /// It is asked for again; at this node, if it has been named.
    Ask(Option<Route>),
    /// The same after a pause.
    Pause,
    /// The same when a session answers.
    Refused,
    /// The caller hears this, and nothing is left at the server.
    Fail(Error),
    /// The caller gets this error, and the call is undone at the server.
    Undo(Error),
    Held(Grant),
}

impl Context {
    /// Sends the ACQUIRE of a call: where its lock is, or there.
    pub(super) fn ask(self: &Arc<Self>, id: CallId, there: Option<Route>) {
        // Handed over under the lock: what undoes the call is handed over behind it.
        let refused = self.table.with(|state| {
            let call = state.call(id)?;
            let first = Arc::clone(call.names.first()?);
            if let Phase::Asking = call.phase {
                return None;
            }
            let (node, asking) = match there {
                Some(route) => (route.node, route.asking),
                None => (self.router.home(&first), false),
            };
            if call.asked == 0 && node.link.is_full() {
                let full = "too many commands wait for an answer";
                return Some(Err(Error::unavailable(full)));
            }
            call.phase = Phase::Asking;
            call.asked = call.asked.saturating_add(1);
            call.session = Arc::clone(&node.session);
            let request = self.request_of(id, call, &node);
            node.link.hand_over(request.asking(asking)).map(Ok)
        });
        match refused {
            None => {}
            Some(Ok(unsent)) => unsent.fail(Error::shut_down()),
            Some(Err(error)) => self.go_on(id, Next::Fail(error)),
        }
    }

    fn request_of(self: &Arc<Self>, id: CallId, call: &Call, node: &Node) -> wire::Request {
        let first = call.names.first().cloned().unwrap_or_default();
        let target = call.request.target(&first);
        let (options, wait_mode) = (call.request.options, call.request.wait_mode);
        let (subject, session) = (target.subject(), &node.session.name);
        let mut cmd = request::acquire(subject, &call.names, options.lease, wait_mode, session);
        if call.request.owner.is_kept() {
            // Ask with the ACQUIRE itself: if WANTED were sent after the grant, a caller refused in
            // between would not be reported.
            cmd.arg("WANTED");
        }
        let context = Arc::downgrade(self);
        let then = Box::new(move |outcome| {
            if let Some(context) = Weak::upgrade(&context) {
                context.answered(id, outcome);
            }
        });
        wire::Request::new(cmd, &first, Manner::Asks, then)
    }

    /// The ACQUIRE of a call was answered, or will not be.
    fn answered(self: &Arc<Self>, id: CallId, outcome: Outcome) {
        let next = match outcome {
            Outcome::Overdue(error) => self.table.with(|state| match state.call(id) {
                Some(call) if !call.was_queued => Next::Undo(error),
                _ => Next::Nothing,
            }),
            Outcome::Told(reply, sending) => {
                // Events from now on belong to the next step, and are kept for it.
                self.table.with(|state| {
                    if let Some(call) = state.call(id) {
                        call.phase = Phase::Pausing;
                    }
                });
                let is_again = sending.as_ref().is_some_and(|sending| sending.again);
                match (read_by(reply, read_acquired), sending) {
                    (Ok(acquired), Some(sending)) => self.on_reply(id, acquired, sending),
                    (Ok(_), None) => Next::Nothing,
                    (Err(error), _) => self.on_refusal(id, error, is_again),
                }
            }
        };
        self.go_on(id, next);
    }

    fn on_reply(self: &Arc<Self>, id: CallId, acquired: Acquired, sending: Sending) -> Next {
        // Looked at under the lock: either another life is seen here, or this is seen by what
        // follows from it.
        self.table.with(|state| match acquired {
            Acquired::NotHeld { lease_left } => Next::Fail(Error::not_acquired(lease_left)),
            Acquired::Granted { token } => {
                let grant = Grant {
                    token,
                    since: sending.at,
                    counts_on: CountsOn::from(&sending),
                };
                Self::on_grant(state, id, grant, sending.is_of_former_life())
            }
            Acquired::Queued { seq, life } => {
                let present = sending.session.life();
                let is_present = present == Some(life) || !sending.is_of_former_life();
                let Some(call) = state.call(id) else {
                    return Next::Nothing;
                };
                let early = std::mem::take(&mut call.early);
                let asked = sending;
                call.phase = Phase::Waiting { life, seq, asked };
                state.joins_queue(id);
                if !is_present {
                    // It was sent in an earlier life, whose waits have left.
                    return Next::Ask(None);
                }
                self.apply_early(state, id, early)
            }
        })
    }

    /// Applies the events that arrived before the reply to the ACQUIRE. Events after the end of the
    /// wait concern the granted hold, and stay in `early` for it.
    fn apply_early(self: &Arc<Self>, state: &mut State, id: CallId, early: Vec<Event>) -> Next {
        let mut early = early.into_iter();
        while let Some(event) = early.next() {
            let next = self.apply_to_wait(state, id, &event, None);
            if !matches!(next, Next::Nothing) {
                if let Some(call) = state.call(id) {
                    call.early = early.collect();
                }
                return next;
            }
        }
        Next::Nothing
    }

    /// A grant can be counted on. If word of it came late, as to a process that was stopped, or
    /// under another life of the session, it is asked for again, which takes nothing more.
    fn on_grant(state: &mut State, id: CallId, grant: Grant, former: bool) -> Next {
        let Some(call) = state.call(id) else {
            return Next::Nothing;
        };
        let lease = call.request.options.lease;
        let is_late = grant.since.elapsed().saturating_mul(FRESH_PART) > lease;
        let is_out_of_touch = |until| until <= Instant::now();
        let is_lost = grant
            .counts_on
            .confidence
            .until()
            .is_some_and(is_out_of_touch);
        if !(former || is_late || is_lost) {
            // Events from now on concern the hold, and are kept for it.
            call.phase = Phase::Pausing;
            return Next::Held(grant);
        }
        call.tries = call.tries.saturating_add(1);
        match call.tries {
            ..=TRIES => Next::Pause,
            _ => Next::Undo(Error::no_reply(None)),
        }
    }

    /// The ACQUIRE was refused, or its reply says nothing.
    fn on_refusal(self: &Arc<Self>, id: CallId, error: Error, is_again: bool) -> Next {
        let there = self.router.redirected(&error);
        let timeout = self.router.response_timeout;
        self.table.with(|state| {
            let Some(call) = state.call(id) else {
                return Next::Nothing;
            };
            let is_late = !call.was_queued && call.since.elapsed() >= timeout;
            let is_sent_on = error.redirect().is_some();
            if error.code() == Code::NoSession && !is_late {
                return Next::Refused;
            }
            if is_sent_on && self.router.are_several() && !is_late {
                call.tries = call.tries.saturating_add(1);
                return match there {
                    Some(route) if call.tries <= HOPS => Next::Ask(Some(route)),
                    _ => Next::Pause,
                };
            }
            let passes = error.is_unavailable()
                && (call.was_queued || matches!(error.code(), Code::Elsewhere | Code::TryAgain));
            if passes && !is_late {
                return Next::Pause;
            }
            // It, or an earlier copy, may have been carried out.
            if is_again || call.asked > 1 || error.is_unknown() {
                return Next::Undo(error.misdirected());
            }
            Next::Fail(error.misdirected())
        })
    }

    /// An event that may be about a wait. None of it happened before `since`.
    pub(super) fn apply_to_wait(
        self: &Arc<Self>,
        state: &mut State,
        id: CallId,
        event: &Event,
        since: Option<Instant>,
    ) -> Next {
        let Some(call) = state.call(id) else {
            return Next::Nothing;
        };
        let Phase::Waiting { life, seq, asked } = &call.phase else {
            return Next::Nothing;
        };
        if Some(*life) != call.session.life() || event.seq <= *seq {
            return Next::Nothing;
        }
        match &event.what {
            What::Granted => {
                let session = Arc::clone(&call.session);
                let Some(confidence) = session.present() else {
                    return Next::Nothing;
                };
                let since = since.map_or(asked.at, |since| since.max(asked.at));
                let counts_on = CountsOn {
                    session,
                    confidence,
                };
                let grant = Grant {
                    token: event.token,
                    since,
                    counts_on,
                };
                Self::on_grant(state, id, grant, false)
            }
            What::TimedOut { lease_left } => Next::Fail(Error::not_acquired(*lease_left)),
            What::Left => Next::Ask(None),
            What::Failed(error) if error.code() == Code::Moved => {
                self.router.request_refresh();
                Next::Ask(None)
            }
            What::Failed(error) if error.is_unavailable() => Next::Pause,
            What::Failed(error) => Next::Fail(error.clone()),
            What::Lost(_) | What::Wanted => Next::Nothing,
        }
    }

    /// Takes the next step.
    pub(super) fn go_on(self: &Arc<Self>, id: CallId, next: Next) {
        match next {
            Next::Nothing => {}
            Next::Ask(there) => self.ask(id, there),
            Next::Pause => self.ask_later(id),
            Next::Refused => self.table.with(|state| {
                state.has_refused = true;
                if let Some(call) = state.call(id) {
                    call.phase = Phase::Refused;
                }
            }),
            Next::Fail(error) => {
                let Some(call) = self.table.with(|state| state.end(id)) else {
                    return;
                };
                call.slots.iter().for_each(|slot| self.pass_turn(*slot));
                let _ = call.reply.send(Err(error));
            }
            Next::Undo(error) => {
                let call = self.table.with(|state| state.end(id));
                if let Some(call) = call {
                    let reply = self.undo(call);
                    let _ = reply.send(Err(error));
                }
            }
            Next::Held(grant) => self.enter(id, &grant),
        }
    }

    fn ask_later(self: &Arc<Self>, id: CallId) {
        let timeout = self.router.response_timeout;
        let pause = self.table.with(|state| {
            let call = state.call(id)?;
            call.phase = Phase::Pausing;
            let left = timeout.saturating_sub(call.since.elapsed());
            let pause = call.backoff.next();
            // One that no server has taken in ends in time.
            Some(if call.was_queued {
                pause
            } else {
                pause.min(left.max(MILLI))
            })
        });
        let Some(pause) = pause else { return };
        let context = Arc::downgrade(self);
        self.background.runtime.spawn(task(async move {
            sleep(pause).await;
            if let Some(context) = context.upgrade() {
                context.ask(id, None);
            }
        }));
    }

    /// The call is granted: makes a hold for each name.
    fn enter(self: &Arc<Self>, id: CallId, grant: &Grant) {
        let entered = self.table.with(|state| {
            let mut call = state.end(id)?;
            let mut holds = SmallVec::<[Arc<Hold>; 1]>::new();
            for (name, id) in call.names.iter().zip(&call.slots) {
                let target = call.request.target(name);
                let hold = Hold::new(target, call.request.options, grant.clone());
                if let Some(slot) = state.at(*id) {
                    slot.enter(Arc::clone(&hold));
                }
                if call.request.kept.is_some() {
                    state.use_kept(*id);
                }
                call.held.push(Held::new(self, Arc::clone(&hold), *id));
                holds.push(hold);
            }
            Some((call, holds))
        });
        let Some((call, holds)) = entered else { return };
        let Call {
            reply,
            held,
            request,
            slots,
            early,
            // Until the guards are there.
            pending: _pending,
            ..
        } = call;
        if request.options.renewed {
            self.watchdog.added(Instant::now());
        }
        for hold in holds.iter().filter(|hold| hold.is_of_former_life()) {
            renew::one(self, hold, Aim::Hold);
        }
        for event in &early {
            let is_meant =
                |hold: &&Arc<Hold>| hold.token == event.token && *hold.target.name == *event.name;
            for hold in holds.iter().filter(is_meant) {
                hold.apply(event);
            }
        }
        for (slot, hold) in slots.into_iter().zip(&holds) {
            match &request.kept {
                None => self.pass_turn(slot),
                Some(key) => keep::watch(self, slot, hold, key.idle),
            }
        }
        // If the caller is gone, the guard is dropped here, and so released.
        let _ = reply.send(Ok(request.in_order(held)));
    }

    /// Undoes a call: CANCEL removes its waiter, and RELEASE gives back a grant that it may have.
    /// Both follow the ACQUIRE on the same link, so the server carries them out after it. The
    /// RELEASE needs no token: the owner still has the turn, so it holds nothing else here.
    pub(super) fn undo(self: &Arc<Self>, call: Call) -> oneshot::Sender<Result<Helds, Error>> {
        let Call {
            request,
            names,
            slots,
            reply,
            held,
            session,
            ..
        } = call;
        self.table.with(|state| {
            for slot in &slots {
                let leaving = Turn::Leaving(state.number());
                state.take_turn(*slot, leaving);
            }
        });
        let first = names.first().cloned().unwrap_or_default();
        let node = self.router.node_of(&session, &first);
        let target = request.target(&first);
        let releases: SmallVec<[_; 1]> = names.iter().map(|name| request.target(name)).collect();
        let context = Arc::downgrade(self);
        let mut pending = Some(self.background.pending.token());
        let again = releases.clone();
        let then = Box::new(move |outcome| {
            // Until the releases are counted in its place.
            let _pending = pending.take();
            if let (Outcome::Told(..), Some(context)) = (outcome, Weak::upgrade(&context)) {
                for (target, slot) in again.iter().zip(&slots) {
                    context.release_at(target, None, *slot, None);
                }
            }
        });
        let cancel = request::cancel(target.subject());
        let cancel = wire::Request::new(cancel, &first, Manner::Twice, then);
        node.link.send(cancel);
        // At once, for the answer may take long; and behind the answer once more, for a server may
        // have put the CANCEL off and not this.
        for target in &releases {
            let release = request::release(target.subject(), None);
            let nothing = Box::new(|_: Outcome| {});
            // Put off, or sent on, it could take what the next call is granted.
            let release = wire::Request::new(release, &target.name, Manner::Asks, nothing);
            node.link.send(release);
        }
        drop(held);
        reply
    }

    /// A server is not there. The calls that it has not taken in end in time, and all if it refuses
    /// us.
    pub(super) fn give_up_unheard(self: &Arc<Self>, session: &Arc<Session>) {
        let (timeout, trouble) = (self.router.response_timeout, session.trouble());
        let ends = |call: &Call| {
            let is_asking = matches!(call.phase, Phase::Asking);
            let is_pausing = !is_asking && !call.was_queued;
            trouble.is_final() || is_pausing && call.since.elapsed() >= timeout
        };
        let late: Vec<_> = self.table.with(|state| {
            let calls = state.calls.iter();
            let here = calls.filter(|(_, call)| Arc::ptr_eq(&call.session, session));
            here.filter(|(_, call)| ends(call))
                .map(|(id, _)| *id)
                .collect()
        });
        for id in late {
            // An earlier copy may have been carried out.
            self.go_on(id, Next::Undo(trouble.clone()));
        }
    }
}

/// A call gives up on an answer this much later than the link does.
const LINK_FIRST: Duration = Duration::from_millis(20);

/// A grant that is heard later than this part of the lease is asked for again.
const FRESH_PART: u32 = 3;

/// How often a grant that cannot be counted on is asked for again.
const TRIES: u32 = 5;

/// How often in a row nodes may redirect a call. Two nodes that have not yet heard of a move
/// redirect it to each other until they have.
const HOPS: u32 = 5;
