//! A call of `lock()` or its siblings: it asks the server, and waits in its queue. The caller may
//! be dropped at any moment; the call is undone then.

use std::sync::{Arc, Weak};
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::oneshot;
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::backoff::Backoff;
use crate::error::{Code, Error};
use crate::locks::table::{Turn, Unsettled};
use crate::locks::{
    Aim, Call, CallId, Context, CountsOn, Grant, Held, Helds, Hold, Phase, Request, SlotId, State,
    renew,
};
use crate::time::MILLI;
use crate::topology::{Node, Route};
use crate::wire::reply::{read_acquired, read_by};
use crate::wire::{Acquired, Event, Manner, Outcome, Sending, Session, WaitMode, What, request};
use crate::{metrics, task, trace, wire};

/// Takes the locks that the request names.
pub(crate) async fn acquire(context: &Arc<Context>, request: Request) -> Result<Helds, Error> {
    check(context, &request)?;
    let since = Instant::now();
    let request = Arc::new(request);
    let span = trace::wait(
        String::from_utf8_lossy(request.names.first().map_or(&[], |name| name)),
        &request.owner,
        request.mode,
    );
    let turn = take_turns(context, &request).await;
    if turn.is_err() {
        consume_budget().await;
    }
    let mut turn = turn?;
    let begun = loop {
        turn.settled_in_time(since).await?;
        if let Some(begun) = turn.begin() {
            break begun;
        }
    };
    let helds = match begun {
        Begun::Held(helds) => {
            // Without this, a task that does nothing else would starve the others of its thread.
            consume_budget().await;
            Ok(helds)
        }
        Begun::Asked(mut pending) => {
            let helds = pending.answer_in_time(since).await;
            if request.wait_mode.waits() {
                span.waited(since);
                metrics::waited(since);
            }
            helds
        }
    }?;
    // The next call of this owner begins only after this one is acknowledged.
    acknowledged(context, helds).await
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

/// It is a caller's turn at each of these, or not yet.
struct Turns {
    context: Arc<Context>,
    request: Arc<Request>,
    slots: SmallVec<[SlotId; 1]>,
    /// At the last of them it waits.
    line: Option<u64>,
}

/// Takes the turn at each slot, in the order of the names. All calls use this order, so two calls
/// for several locks never wait for each other's turns in a circle.
async fn take_turns(context: &Arc<Context>, request: &Arc<Request>) -> Result<Turns, Error> {
    let mut turns = Turns {
        context: Arc::clone(context),
        request: Arc::clone(request),
        slots: SmallVec::new(),
        line: None,
    };
    let mut names = request.names.clone();
    names.sort_unstable();
    for name in names {
        let target = request.target(&name);
        let waiting = context.table.with(|state| {
            let slot = state.slot(&target);
            turns.slots.push(slot);
            if state.turn(slot).is_none() {
                state.take_turn(slot, Turn::Next(NOT_IN_LINE));
                return Ok(None);
            }
            let is_queued = |(_, call): (_, &mut Call)| matches!(call.phase, Phase::Waiting { .. });
            if !request.wait_mode.waits() && state.call_at(slot).is_some_and(is_queued) {
                return Err(Error::not_acquired(Some(Duration::ZERO)));
            }
            Ok(Some(state.line_up(slot, request.wait_mode.waits())))
        });
        match waiting {
            Ok(None) => {}
            Ok(Some((number, told))) => {
                turns.line = Some(number);
                turns.wait(told).await?;
                turns.line = None;
            }
            Err(error) => {
                turns.slots.pop();
                return Err(error);
            }
        }
    }
    Ok(turns)
}

impl Turns {
    /// Waits for the turn. Behind a call in the server's queue it waits as long as its own caller
    /// would; behind any other command, no longer than a reply may take.
    async fn wait(&self, mut told: oneshot::Receiver<()>) -> Result<(), Error> {
        let context = &self.context;
        let deadline = match self.request.wait_mode {
            WaitMode::Until(deadline) => Some(deadline),
            WaitMode::None | WaitMode::Forever => None,
        };
        let mut looked = Instant::now();
        loop {
            let next = looked
                .checked_add(context.router.response_timeout)
                .unwrap_or(looked);
            let at = deadline.map_or(next, |deadline| deadline.min(next));
            tokio::select! {
                biased;
                told = &mut told => {
                    // The call before has joined the server's queue, and a try does not wait there.
                    let refused = |_| Error::not_acquired(Some(Duration::ZERO));
                    return told.map_err(refused);
                }
                () = context.background.closing.cancelled() => return Err(Error::shut_down()),
                () = sleep_until(at) => {}
            }
            let slot = self.slots.last().copied().unwrap_or_default();
            let is_queued = context.table.with(|state| {
                // A call that waits for its turn at another lock counts as a wait too.
                let is_next = matches!(state.turn(slot), Some(Turn::Next(_)));
                let call = state.call_at(slot);
                is_next || call.is_some_and(|(_, call)| call.was_queued)
            });
            if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                return Err(Error::not_acquired(Some(Duration::ZERO)));
            }
            if is_queued && !self.request.wait_mode.waits() {
                return Err(Error::not_acquired(Some(Duration::ZERO)));
            }
            if !is_queued {
                return Err(self.busy());
            }
            looked = Instant::now();
        }
    }

    fn busy(&self) -> Error {
        let busy = "an earlier command of this owner is not answered";
        let trouble = self.context.router.trouble();
        trouble.unwrap_or_else(|| Error::unavailable(busy))
    }

    /// Clears up the owner's former holds at these locks before it asks for them.
    ///
    /// A lost hold that the server may still have is released first. The reply to a MACQUIRE names
    /// one token for all locks, so it would give a lock with an earlier token the wrong one. A hold
    /// of a former life of the session is renewed first. The server may have granted the lock to
    /// another owner since; the hold's guards end in time, but a new guard must not begin on it.
    async fn settled(&self) -> Result<(), Error> {
        let context = &self.context;
        while let Some(unsettled) = context.table.with(|state| state.unsettled(&self.slots)) {
            let settled = match &unsettled {
                Unsettled::Lost(hold) => context.release_lost(hold).await,
                Unsettled::OfFormerLife(hold) => renew::ask(context, hold, Aim::Hold).await,
            };
            match settled {
                Err(error) if !error.is_lost() => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// The same, within the time for a reply.
    async fn settled_in_time(&self, since: Instant) -> Result<(), Error> {
        let limit = since.checked_add(self.context.router.response_timeout);
        let settled = timeout_at(limit.unwrap_or(since), self.settled()).await;
        settled.unwrap_or_else(|_| Err(self.busy()))
    }

    /// It is its turn everywhere: takes part in what the owner holds, and asks for the rest.
    /// Nothing, if something was lost meanwhile.
    fn begin(&mut self) -> Option<Begun> {
        let (context, request) = (Arc::clone(&self.context), Arc::clone(&self.request));
        let (reply, answer) = oneshot::channel();
        let now = Instant::now();
        let begun = context.table.with(|state| {
            if state.unsettled(&self.slots).is_some() {
                return None;
            }
            let slots = std::mem::take(&mut self.slots);
            let mut missing = SmallVec::<[(Arc<[u8]>, SlotId); 1]>::new();
            let mut held = Helds::new();
            let mut names = request.names.clone();
            names.sort_unstable();
            for (name, slot) in names.into_iter().zip(slots) {
                match state.live(slot, now) {
                    Some(present) => {
                        present.gains_guard();
                        held.push(Held::new(&context, present, slot));
                        state.pass_turn(slot);
                    }
                    None => missing.push((name, slot)),
                }
            }
            let Some((first, _)) = missing.first() else {
                return Some(Ok(held));
            };
            let home = context.router.home(first);
            let (names, slots) = missing
                .into_iter()
                .unzip::<_, _, SmallVec<_>, SmallVec<_>>();
            let id = state.begin(|number| Call {
                number,
                request: Arc::clone(&request),
                names,
                slots,
                held,
                phase: Phase::Pausing,
                asked: 0,
                session: Arc::clone(&home.session),
                early: Vec::new(),
                reply,
                pending: context.background.pending.token(),
                since: now,
                was_queued: request.was_held_up,
                tries: 0,
                backoff: Backoff::new(),
            });
            Some(Err(id))
        });
        Some(match begun? {
            Ok(held) => Begun::Held(in_order(held, &request)),
            Err(id) => {
                context.ask(id, None);
                Begun::Asked(Pending {
                    context,
                    request,
                    id,
                    answer,
                })
            }
        })
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        let mut slots = std::mem::take(&mut self.slots);
        if let Some(number) = self.line
            && let Some(last) = slots.pop()
        {
            let is_turn = |state: &mut State| state.leave_line(last, number);
            slots.extend(self.context.table.with(is_turn).then_some(last));
        }
        slots
            .into_iter()
            .for_each(|slot| self.context.pass_turn(slot));
    }
}

/// The parts in the order of the names.
fn in_order(mut held: Helds, request: &Request) -> Helds {
    let place = |held: &Held| {
        let mut names = request.names.iter();
        names.position(|name| *name == held.hold.target.name)
    };
    if held.len() > 1 {
        held.sort_by_key(place);
    }
    held
}

enum Begun {
    Held(Helds),
    Asked(Pending),
}

/// A caller who listens. When it goes, the call is undone.
struct Pending {
    context: Arc<Context>,
    request: Arc<Request>,
    id: CallId,
    answer: oneshot::Receiver<Result<Helds, Error>>,
}

impl Pending {
    /// A try ends within the response timeout, however often the call had to ask. The link's own
    /// timeout covers a single command.
    async fn answer_in_time(&mut self, since: Instant) -> Result<Helds, Error> {
        if self.request.wait_mode.waits() {
            return self.answer().await;
        }
        let limit = self
            .context
            .router
            .response_timeout
            .saturating_add(LINK_FIRST);
        let limit = since.checked_add(limit);
        let answer = timeout_at(limit.unwrap_or(since), self.answer()).await;
        answer.unwrap_or_else(|_| Err(self.no_answer()))
    }

    async fn answer(&mut self) -> Result<Helds, Error> {
        let closing = self.context.background.closing.clone();
        let WaitMode::Until(deadline) = self.request.wait_mode else {
            let waits = self.request.wait_mode.waits();
            return tokio::select! {
                biased;
                answer = &mut self.answer => answer.unwrap_or_else(|_| Err(Error::shut_down())),
                () = closing.cancelled(), if waits => Err(Error::shut_down()),
            };
        };
        // The server's own word comes first; without one the time is up all the same.
        let limit = deadline.checked_add(self.context.router.response_timeout);
        tokio::select! {
            biased;
            answer = timeout_at(limit.unwrap_or(deadline), &mut self.answer) => match answer {
                Ok(answer) => answer.unwrap_or_else(|_| Err(Error::shut_down())),
                Err(_) => Err(self.no_answer()),
            },
            () = closing.cancelled() => Err(Error::shut_down()),
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
    /// The same when the session is heard of again.
    WithSession,
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
                match (read_by(reply, read_acquired), sending) {
                    (Ok(acquired), Some(sending)) => self.on_reply(id, acquired, sending),
                    (Ok(_), None) => Next::Nothing,
                    (Err(error), sending) => {
                        // A node that was replaced before it answered may have carried it out.
                        let is_left = error.code() == Code::Elsewhere;
                        let is_again = sending.is_some_and(|sending| sending.again || is_left);
                        self.on_refusal(id, error, is_again)
                    }
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
                let (session, confidence) = (Arc::clone(&sending.session), sending.confidence());
                let grant = Grant {
                    token,
                    since: sending.at,
                    counts_on: CountsOn {
                        session,
                        confidence,
                    },
                };
                Self::on_grant(state, id, grant, sending.is_of_former_life())
            }
            Acquired::Queued { seq, life } => {
                let present = sending.session.life();
                let is_present = present == Some(life) || !sending.is_of_former_life();
                let Some(call) = state.call(id) else {
                    return Next::Nothing;
                };
                (call.was_queued, call.tries) = (true, 0);
                let early = std::mem::take(&mut call.early);
                let asked = sending;
                call.phase = Phase::Waiting { life, seq, asked };
                state.refuse_tries(id);
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
            ..=TRIES if is_lost || former => Next::Pause,
            ..=TRIES => Next::Ask(None),
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
                return Next::WithSession;
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
            Next::WithSession => self.table.with(|state| {
                if let Some(call) = state.call(id) {
                    call.phase = Phase::Pausing;
                    state.ask_with_session(id);
                }
            }),
            Next::Fail(error) => {
                let Some(call) = self.table.with(|state| state.end(id)) else {
                    return;
                };
                // Its node was replaced since the answer, and it has been asked for at another.
                if let Phase::Asking = call.phase {
                    let _ = self.undo(call).send(Err(error));
                    return;
                }
                call.slots.iter().for_each(|slot| self.pass_turn(*slot));
                call.fail(error);
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
            for (name, slot) in call.names.iter().zip(&call.slots) {
                let target = call.request.target(name);
                let hold = Hold::new(target, call.request.options, grant.clone());
                if let Some(slot) = state.at(*slot) {
                    // One that was here before is lost, and its guards give nothing back.
                    slot.hold = Some(Arc::clone(&hold));
                    slot.left = None;
                }
                call.held.push(Held::new(self, Arc::clone(&hold), *slot));
                state.pass_turn(*slot);
                holds.push(hold);
            }
            Some((call, holds))
        });
        let Some((call, holds)) = entered else { return };
        if call.request.options.renewed {
            self.watchdog.added(Instant::now());
        }
        for hold in holds.iter().filter(|hold| hold.is_of_former_life()) {
            renew::one(self, hold, Aim::Hold);
        }
        for event in &call.early {
            let is_meant =
                |hold: &&Arc<Hold>| hold.token == event.token && *hold.target.name == *event.name;
            for hold in holds.iter().filter(is_meant) {
                hold.apply(event);
            }
        }
        let Call {
            reply,
            held,
            request,
            pending,
            ..
        } = call;
        // If the caller is gone, the guard is dropped here, and so released.
        let _ = reply.send(Ok(in_order(held, &request)));
        drop(pending);
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
                state.take_turn(*slot, Turn::Leaving);
                if let Some(slot) = state.at(*slot) {
                    slot.left = None;
                }
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
                    let node = context.router.home(&target.name);
                    context.send_release(&node, target, None, Some(*slot), None);
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
            let is_pausing = matches!(call.phase, Phase::Pausing) && !call.was_queued;
            trouble.is_final() || is_pausing && call.since.elapsed() >= timeout
        };
        let late: Vec<_> = self.table.with(|state| {
            let calls = state.calls();
            let here = calls.filter(|(_, call)| Arc::ptr_eq(&call.session, session));
            here.filter(|(_, call)| ends(call))
                .map(|(id, _)| id)
                .collect()
        });
        for id in late {
            // An earlier copy may have been carried out.
            self.go_on(id, Next::Undo(trouble.clone()));
        }
    }
}

impl Call {
    fn fail(self, error: Error) {
        let _ = self.reply.send(Err(error));
    }
}

/// The number of a turn that was free, so that no call waited for it.
const NOT_IN_LINE: u64 = 0;

/// A call gives up on an answer this much later than the link does.
const LINK_FIRST: Duration = Duration::from_millis(20);

/// A grant that is heard later than this part of the lease is asked for again.
const FRESH_PART: u32 = 3;

/// How often a grant that cannot be counted on is asked for again.
const TRIES: u32 = 5;

/// How often in a row nodes may redirect a call. Two nodes that have not yet heard of a move
/// redirect it to each other until they have.
const HOPS: u32 = 5;
