//! A call of `lock()` or its siblings: it asks the server, and waits in its queue. The caller may
//! be dropped at any moment; the call is undone then.

use std::sync::{Arc, Weak};

use futures_util::FutureExt;
use futures_util::future::try_join_all;
use tokio::sync::oneshot;
use tokio::task::coop::{consume_budget, unconstrained};
use tokio::time::Instant;

use crate::error::{Code, Error};
use crate::locks::caller::Caller;
use crate::locks::table::Turn;
use crate::locks::{
    Aim, Call, CallId, Context, Held, Helds, Hold, Phase, Request, SlotId, keep, renew,
};
use crate::time::MILLI;
use crate::topology::{Node, Route};
use crate::wire;
use crate::wire::reply::{read_acquired, read_by};
use crate::wire::{Acquired, Event, Manner, Outcome, Sending, What, request};

/// Takes the locks that the request names.
pub(crate) async fn acquire(context: &Arc<Context>, request: Request) -> Result<Helds, Error> {
    if let Err(error) = check(context, &request) {
        // Otherwise a caller that asks again and again would starve its thread, and a shutdown
        // there.
        consume_budget().await;
        return Err(error);
    }
    let mut helds = Caller::new(context, request).take().await?;
    // A grant counts only when enough copies have it. The next call of its owner waits for that
    // too. A kept lock that is handed on was acknowledged before.
    if context.router.identity.durability.is_some() && helds.iter().any(|held| !held.stays) {
        let acknowledged = Box::pin(acknowledge(context, &helds)).await;
        acknowledged.map_err(Error::unacknowledged)?;
    }
    helds.iter_mut().for_each(|held| held.stays = true);
    Ok(helds)
}

fn check(context: &Context, request: &Request) -> Result<(), Error> {
    // Two clients that share an owner would each think that it is alone.
    if !request.owner.is_of(&context.id) {
        return Err(Error::refused("the owner belongs to another client"));
    }
    let first = request.names.first().map_or(&[][..], |name| name);
    context.node_with_room(first).map(drop)
}

/// Waits until enough copies have these, mostly by one wait.
async fn acknowledge(context: &Arc<Context>, helds: &Helds) -> Result<(), Error> {
    let renewals = helds.iter();
    let renewals = renewals.map(|held| renew::ask(context, &held.hold, Aim::Lease));
    let mut renewals = try_join_all(renewals);
    // The first poll hands all of them over, before a wait begins.
    // A caller does not stand in line for it: if that were given to one that is never polled again,
    // no wait would begin any more. Beside another these may share two waits, and not one.
    let gathering = context.router.identity.gathering.try_lock();
    let told = unconstrained(&mut renewals).now_or_never();
    drop(gathering);
    let told = match told {
        Some(told) => told,
        None => renewals.await,
    };
    told.map(drop)
}

/// The next step after an answer or an event. It is taken after the table's mutex is released.
pub(super) enum Next {
    /// It is asked for again; at this node, if it has been named.
    Ask(Option<Route>),
    /// The same after a pause.
    Pause,
    /// The caller hears this, and nothing is left at the server.
    Fail(Error),
    /// The caller gets this error, and the call is undone at the server.
    Undo(Error),
    /// It is granted with this token, by this word.
    Held(u64, Sending),
}

impl Context {
    /// Sends the ACQUIRE of a call: where its lock is, or there.
    pub(super) fn ask(self: &Arc<Self>, id: CallId, there: Option<Route>) {
        self.ask_if(id, there, |_| true);
    }

    /// The same, if the call still matches.
    pub(super) fn ask_if(
        self: &Arc<Self>,
        id: CallId,
        there: Option<Route>,
        which: impl Fn(&Call) -> bool,
    ) {
        // Handed over under the lock: what undoes the call is handed over behind it.
        let unsent = self.table.with(|state| {
            let call = state.calls.get_mut(&id).filter(|call| which(call))?;
            if let Phase::Asking = call.phase {
                return None;
            }
            let (node, asking) = match there {
                Some(route) => (route.node, route.asking),
                None => (self.router.home(call.first()), false),
            };
            call.phase = Phase::Asking;
            call.asked = call.asked.saturating_add(1);
            if !Arc::ptr_eq(&call.session, &node.session) {
                // These events are of another node, and say nothing about the new command. The
                // lives of two nodes can have the same number.
                call.early.clear();
            }
            call.session = Arc::clone(&node.session);
            (call.asking, call.has_moved) = (asking, false);
            let request = self.request_of(id, call, &node);
            node.link.hand_over(request.asking(asking))
        });
        if let Some(unsent) = unsent {
            unsent.fail(Error::shut_down());
        }
    }

    fn request_of(&self, id: CallId, call: &Call, node: &Node) -> wire::Request {
        let target = call.request.target(call.first());
        let (lease, wait_mode) = (call.request.options.lease, call.request.wait_mode);
        let session = node.session.name();
        let names = call.slots.iter().map(|(name, _)| name);
        let mut cmd = request::acquire(&target, names, lease, wait_mode, session);
        if call.request.owner.is_kept {
            // Ask with the ACQUIRE itself: if WANTED were sent after the grant, a caller refused in
            // between would not be reported.
            cmd.arg("WANTED");
        }
        wire::Request::of_call(id, self.this.clone(), cmd, &target.name)
    }

    /// The ACQUIRE of a call was answered, or will not be.
    pub(super) fn on_answer(self: &Arc<Self>, id: CallId, outcome: Outcome) {
        // Looked at under the lock: either another life is seen here, or this is seen by what
        // follows from it.
        let next = self.table.with(|state| {
            let call = state.calls.get_mut(&id)?;
            let (reply, sending) = match outcome {
                Outcome::Overdue(_) if call.was_queued => return None,
                Outcome::Overdue(error) => return Some(Next::Undo(error)),
                Outcome::Told(reply, sending) => (reply, sending),
            };
            // Events from now on belong to the next step, and are kept for it.
            call.phase = Phase::Pausing;
            let next = match (read_by(reply, read_acquired), sending) {
                (Ok(acquired), Some(sending)) => self.on_reply(call, acquired, sending),
                (Ok(_), None) => None,
                (Err(error), sending) => {
                    // Sent to a node that was replaced before it answered, it may have been
                    // carried out there.
                    let is_left = error.code == Code::Elsewhere;
                    let is_again = sending.is_some_and(|sending| sending.again || is_left);
                    self.on_refusal(call, error, is_again)
                }
            };
            state.has_refused |= matches!(call.phase, Phase::Refused);
            state.wake_late_behind(id);
            if next.is_some() {
                // Other threads do not ask for a pausing call: the next step does.
                state.calls.get_mut(&id)?.phase = Phase::Pausing;
            }
            next
        });
        self.go_on(id, next);
    }

    fn on_reply(&self, call: &mut Call, acquired: Acquired, sending: Sending) -> Option<Next> {
        if let Acquired::Granted(token) = acquired
            && call.given_back == Some(token)
        {
            // The node could not carry the release out, and has the grant still. Others may have
            // had the lock since.
            call.stray = Some((token, sending.session));
            self.give_back_stray(call, None);
            return Some(Next::Pause);
        }
        if !sending.asking {
            self.give_back_stray(call, Some(acquired));
        }
        let (seq, life) = match acquired {
            Acquired::NotHeld(lease_left) => {
                return Some(call.refused(Error::not_acquired(lease_left), &sending));
            }
            Acquired::Granted(token) => return Some(call.granted(token, sending.at_present())),
            Acquired::Queued { seq, life } => (seq, life),
        };
        let is_present = sending.session.life() == Some(life) || !sending.is_of_former_life();
        let early = std::mem::take(&mut call.early).into_iter();
        let asked = sending;
        call.phase = Phase::Waiting { life, seq, asked };
        (call.was_queued, call.tries) = (true, 0);
        if !is_present {
            // It was sent in an earlier life, whose waits have left.
            return Some(Next::Ask(None));
        }
        // Those of another life, perhaps at another node, are not about this wait.
        let mut early = early.filter(|(of, _)| *of == life);
        let next = early.find_map(|(_, event)| self.apply_to_wait(call, &event, None));
        // Events after the end of the wait concern the granted hold.
        call.early = early.collect();
        next
    }

    /// The node that serves the lock has answered by itself, so the lock is not where a grant
    /// behind `ASKING` came from. If that stayed there, a later call behind `ASKING` would find it,
    /// with a smaller token than owners had in between. If that node serves it by now, the grant is
    /// the same one.
    fn give_back_stray(&self, call: &mut Call, answer: Option<Acquired>) {
        let stray = call.stray.take();
        let is_other = |(token, _): &(u64, _)| answer != Some(Acquired::Granted(*token));
        let Some((token, session)) = stray.filter(is_other) else {
            return;
        };
        call.given_back = Some(token);
        let link = &self.router.node_of(&session, call.first()).link;
        for (name, _) in &call.slots {
            let release = request::release(&call.request.target(name), Some(token));
            // A client that shuts down waits for it.
            let mut pending = Some(self.background.pending.token());
            let told = move |_| drop(pending.take());
            let release = wire::Request::new(release, name, Manner::Asks, told);
            link.send(release.asking(true));
        }
    }

    /// The ACQUIRE was refused, or its reply says nothing.
    fn on_refusal(&self, call: &mut Call, error: Error, is_again: bool) -> Option<Next> {
        if error.code == Code::TryAgain && call.request.wait_mode.waits() {
            // The server is there, and the keys of the lock are on their way to each other.
            call.since = Instant::now();
        }
        let is_late = !call.was_queued && call.since.elapsed() >= self.router.response_timeout;
        let there = self.router.redirected(&error);
        let is_sent_on = error.redirect().is_some() && self.router.are_several();
        let may_pass = call.was_queued
            || matches!(
                error.code,
                Code::Elsewhere | Code::TryAgain | Code::ClusterDown
            );
        match there {
            Some(route) if call.has_tries() => return Some(Next::Ask(Some(route))),
            _ if is_late => {}
            // Decided under the table's lock, as `moved` looks at calls: a node that is replaced
            // before this is seen here, and one that is replaced after it finds the call refused.
            // Otherwise the call would wait for a session that never answers again.
            _ if error.code == Code::NoSession && call.session.is_retired() => {
                return Some(Next::Pause);
            }
            _ if error.code == Code::NoSession => {
                // It is asked for again when a session answers.
                call.phase = Phase::Refused;
                return None;
            }
            _ if is_sent_on || may_pass && error.is_unavailable() => {
                call.tries = 0;
                return Some(Next::Pause);
            }
            _ => {}
        }
        // It, or an earlier copy, may have been carried out.
        let may_be_held = is_again || call.asked > 1 || error.is_unknown();
        let end = if may_be_held { Next::Undo } else { Next::Fail };
        Some(end(error.misdirected()))
    }

    /// An event that may be about a wait. None of it happened before `since`.
    pub(super) fn apply_to_wait(
        &self,
        call: &mut Call,
        event: &Event,
        since: Option<Instant>,
    ) -> Option<Next> {
        let Phase::Waiting { life, seq, asked } = &call.phase else {
            return None;
        };
        if Some(*life) != call.session.life() || event.seq <= *seq {
            return None;
        }
        match &event.what {
            What::Granted => {
                let mut by = asked.clone();
                by.at = since.map_or(by.at, |since| since.max(by.at));
                let present = by.session.present();
                // Another thread may have heard of the next life just now: then the wait is asked
                // for again.
                by.confidence = present.filter(|present| present.life == *life)?;
                Some(call.granted(event.token, by))
            }
            What::TimedOut(lease_left) => {
                Some(call.refused(Error::not_acquired(*lease_left), asked))
            }
            What::Left => Some(Next::Ask(None)),
            What::Failed(error) if error.code == Code::Moved => {
                self.router.request_refresh();
                Some(Next::Ask(None))
            }
            What::Failed(error) if error.is_unavailable() => Some(Next::Pause),
            What::Failed(error) => Some(call.refused(error.clone(), asked)),
            What::Lost(_) | What::Wanted => None,
        }
    }

    /// Takes the next step.
    pub(super) fn go_on(self: &Arc<Self>, id: CallId, next: Option<Next>) {
        let ended = || self.table.with(|state| state.calls.remove(&id));
        match next {
            None => {}
            Some(Next::Ask(there)) => self.ask(id, there),
            Some(Next::Pause) => self.ask_later(id),
            Some(Next::Fail(error)) => {
                let Some(call) = ended() else { return };
                let slots = call.slots.iter();
                slots.for_each(|(_, slot)| self.pass_turn(*slot));
                let _ = call.reply.send(Err(error));
            }
            Some(Next::Undo(error)) => {
                let reply = ended().map(|call| self.undo(call));
                reply.map(|reply| reply.send(Err(error)));
            }
            Some(Next::Held(token, by)) => self.enter(id, token, &by),
        }
    }

    fn ask_later(self: &Arc<Self>, id: CallId) {
        let timeout = self.router.response_timeout;
        let pause = self.table.with(|state| {
            let call = state.calls.get_mut(&id)?;
            call.phase = Phase::Pausing;
            let mut pause = call.backoff.next();
            if !call.was_queued {
                // One that no server has taken in ends in time.
                let left = timeout.saturating_sub(call.since.elapsed());
                pause = pause.min(left.max(MILLI));
            }
            Some(pause)
        });
        if let Some(pause) = pause {
            self.later(pause, move |context| context.ask(id, None));
        }
    }

    /// The call is granted: makes a hold for each name.
    fn enter(self: &Arc<Self>, id: CallId, token: u64, by: &Sending) {
        let entered = self.table.with(|state| {
            let call = state.calls.remove(&id)?;
            let parts = call.slots.iter().map(|(name, id)| {
                let target = call.request.target(name);
                let hold = Hold::new(target, call.request.options, token, by.clone());
                state.enter(*id, &hold);
                Held::new(self, hold, *id)
            });
            Some((parts.collect::<Helds>(), call))
        });
        let Some((parts, call)) = entered else { return };
        for Held { hold, slot, .. } in &parts {
            // Those of another life are about another hold, though it may have the same token.
            let is_meant = |(life, event): &&(i64, Event)| {
                let is_its_name = *hold.target.name == *event.name;
                *life == by.confidence.life && hold.token == event.token && is_its_name
            };
            let mut has_moved = call.has_moved;
            for (_, event) in call.early.iter().filter(is_meant) {
                has_moved |= hold.apply(event);
            }
            if has_moved {
                self.confirm_where_it_is(hold);
            } else if hold.is_of_former_life() {
                renew::one(self, hold, Aim::Hold);
            }
            match &call.request.kept {
                None => self.pass_turn(*slot),
                Some(key) => keep::watch(self, *slot, hold, key.idle),
            }
        }
        let mut helds = call.held;
        helds.extend(parts);
        // If the caller is gone, the guard is dropped here, and so released.
        let _ = call.reply.send(Ok(helds));
    }

    /// Undoes a call: CANCEL removes its waiter, and RELEASE gives back a grant that it may have.
    /// Both follow the ACQUIRE on the same link, so the server carries them out after it. The
    /// RELEASE needs no token: the owner still has the turn, so it holds nothing else here. All are
    /// handed over in one step: otherwise another thread could hear the answers to the first, and
    /// pass the turn on, before the last is sent.
    ///
    /// It is sent right behind the CANCEL, also for a client that is gone by the answer; and again
    /// behind that answer, for a server may have put the CANCEL off, and not the RELEASE. Before
    /// the CANCEL it would miss a grant that comes between the two.
    pub(super) fn undo(self: &Arc<Self>, mut call: Call) -> oneshot::Sender<Result<Helds, Error>> {
        self.give_back_stray(&mut call, None);
        let slots: Vec<SlotId> = call.slots.iter().map(|(_, slot)| *slot).collect();
        let first = call.request.target(call.first());
        let link = &self.router.node_of(&call.session, &first.name).link;
        let releases = call.slots.iter().map(|(name, _)| {
            let release = request::release(&call.request.target(name), None);
            // Put off, or sent on, it could take what the next call is granted.
            wire::Request::new(release, name, Manner::Asks, |_| {}).asking(call.asking)
        });
        let releases: Vec<_> = releases.collect();
        let (context, asking) = (Arc::downgrade(self), call.asking);
        let mut pending = Some(call.pending);
        let then = move |outcome| {
            if let (Outcome::Told(..), Some(context)) = (&outcome, Weak::upgrade(&context)) {
                for (name, slot) in &call.slots {
                    context.release_at(&call.request.target(name), None, *slot, None);
                }
            }
            // Now the releases are counted in its place.
            drop(pending.take());
        };
        let cancel = request::cancel(&first);
        let cancel = wire::Request::new(cancel, &first.name, Manner::Twice, then);
        let unsent: Vec<_> = self.table.with(|state| {
            for slot in slots {
                let leaving = Turn::Leaving(state.number());
                state.take_turn(slot, leaving);
            }
            let requests = std::iter::once(cancel.asking(asking)).chain(releases);
            let unsent = requests.filter_map(|request| link.hand_over(request));
            unsent.collect()
        });
        for request in unsent {
            request.fail(Error::shut_down());
        }
        call.reply
    }
}

impl Call {
    #[expect(clippy::indexing_slicing, reason = "a call is for something")]
    fn first(&self) -> &Arc<[u8]> {
        &self.slots[0].0
    }

    /// The server has not granted it. Of several locks an earlier copy of its command may have
    /// taken all, and lost only some of them since; and a node that the slot has left may have
    /// granted it behind an `ASKING`.
    fn refused(&self, error: Error, sending: &Sending) -> Next {
        let is_again = sending.again || self.asked > 1;
        let may_have_some = self.slots.len() > 1 && is_again || self.stray.is_some();
        let end = if may_have_some {
            Next::Undo
        } else {
            Next::Fail
        };
        end(error)
    }

    /// A grant can be counted on. If word of it came late, as to a process that was stopped, or
    /// under another life of the session, it is asked for again, which takes nothing more.
    ///
    /// So is one behind `ASKING`, once: the command may have come late, when the slot had gone back
    /// and was on its way once more. Then the node that serves the slot may have granted the lock
    /// to another owner. If it sends us there again, the lock is not with it.
    fn granted(&mut self, token: u64, by: Sending) -> Next {
        let lease = self.request.options.lease;
        let is_late = by.at.elapsed().saturating_mul(FRESH_PART) > lease;
        let until = by.confidence.until();
        let is_lost = until.is_some_and(|until| until <= Instant::now());
        let before = by.asking.then(|| {
            let stray = (token, Arc::clone(&by.session));
            self.stray.replace(stray).map(|(before, _)| before)
        });
        let is_stray = before.is_some_and(|before| before != Some(token));
        if by.is_of_former_life() || is_late || is_lost || is_stray {
            // Without a pause where it can help: a short lease would end meanwhile.
            let again = if is_lost {
                Next::Pause
            } else {
                Next::Ask(None)
            };
            let again = self.has_tries().then_some(again);
            return again.unwrap_or_else(|| Next::Undo(Error::no_reply()));
        }
        // Events from now on concern the hold, and are kept for it.
        self.phase = Phase::Pausing;
        Next::Held(token, by)
    }

    /// Whether it may try once more: nodes may redirect a call to each other until both have heard
    /// of a move, and word of a grant may come late again.
    fn has_tries(&mut self) -> bool {
        self.tries = self.tries.saturating_add(1);
        self.tries <= TRIES
    }
}

/// A grant that is heard later than this part of the lease is asked for again.
const FRESH_PART: u32 = 3;

/// How often in a row a call may be redirected, or ask again for a grant.
const TRIES: u32 = 5;
