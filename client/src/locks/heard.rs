//! Applies events and new lives of a session.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio::time::Instant;

use crate::error::{Code, Error};
use crate::locks::acquire::Next;
use crate::locks::{Aim, Call, CallId, Context, Hold, Phase, State, renew};
use crate::topology::slot_of;
use crate::wire::{Event, Listener, Manner, Outcome, Request, Session, Told, What};

impl Listener for Context {
    fn heard(&self, session: &Arc<Session>, told: &Told, is_new: bool, since: Option<Instant>) {
        let Some(this) = self.this.upgrade() else {
            return;
        };
        if is_new {
            this.begins_anew(session, told.life);
        }
        // Marks all lost holds in one look at the table: a caller that hears of one lost lock may
        // ask for several at once, and must not share a hold that is lost as well.
        let subjects: Vec<_> = this.table.with(|state| {
            let subject = |event| this.subject(state, session, told.life, event, since);
            told.events.iter().filter_map(subject).collect()
        });
        for subject in subjects {
            match subject {
                Subject::Call(id, next) => this.go_on(id, next),
                Subject::Hold(hold) => this.confirm_where_it_is(&hold),
            }
        }
        let has_refused = |state: &mut State| std::mem::take(&mut state.has_refused);
        if this.table.with(has_refused) {
            this.ask_all(|call| matches!(call.phase, Phase::Refused));
            let was_refused = |hold: &Arc<Hold>| hold.was_refused.swap(false, Ordering::Relaxed);
            renew::all(&this, was_refused);
        }
    }

    fn answered(self: Arc<Self>, call: CallId, outcome: Outcome) {
        self.on_answer(call, outcome);
    }

    fn broken(&self, session: &Arc<Session>) {
        self.router.request_refresh();
        let Some(this) = self.this.upgrade() else {
            return;
        };
        // The calls that the server has not taken in end in time, and all if it refuses us.
        let (timeout, trouble) = (this.router.response_timeout, session.trouble());
        let ends = |call: &Call| {
            let is_pausing = !call.was_queued && !matches!(call.phase, Phase::Asking);
            let ends = trouble.is_final() || is_pausing && call.since.elapsed() >= timeout;
            Arc::ptr_eq(&call.session, session) && ends
        };
        let ended = this.table.with(|state| state.end_calls(ends));
        for call in ended {
            // An earlier copy may have been carried out.
            let _ = this.undo(call).send(Err(trouble.clone()));
        }
    }

    fn refused(&self) {
        // It may have become a replica, whose session connection still answers: then nothing else
        // tells that its slots are at another node. Without this Valkey 9, which closes command
        // connections there, kept holds and waits at the replica until they ended: the test is
        // `client_cluster::a_failover_in_good_order_costs_nothing` on that server.
        self.router.request_refresh();
    }

    fn redirected(&self, session: &Arc<Session>, mut request: Request, error: Error) {
        if request.manner == Manner::Asks {
            return request.fail(error);
        }
        let there = self.router.redirected(&error);
        let is_lost = request.hops.is_multiple_of(HOPS);
        if let Some(route) = there.filter(|_| !is_lost) {
            request = request.asking(route.asking);
            return route.node.link.send(request);
        }
        let name = Arc::clone(&request.name);
        if error.code == Code::Elsewhere && !self.router.is_home(session, &name) {
            return self.router.home(&name).link.send(request.asking(false));
        }
        // Nobody knows yet, or two that have not yet heard of a move send it to each other.
        self.later(request.pause(), move |context| {
            context.router.home(&name).link.send(request.asking(false));
        });
    }

    fn is_home(&self, session: &Arc<Session>, name: &[u8]) -> bool {
        self.router.is_home(session, name)
    }

    fn moved(self: Arc<Self>, slots: &BTreeSet<u16>) {
        let has_moved = |name: &[u8]| slots.contains(&slot_of(name));
        let is_left = |session: &Session| session.is_retired();
        let is_elsewhere = |call: &Call| {
            let first = call.slots.first().map(|(name, _)| name);
            first.is_some_and(|name| has_moved(name) && !self.router.is_home(&call.session, name))
        };
        // The calls before the holds: one that becomes a hold in between must not be missed.
        self.table.with(|state| {
            let calls = state.calls.values_mut();
            calls.for_each(|call| call.has_moved |= is_elsewhere(call));
        });
        renew::all(&self, |hold| {
            has_moved(&hold.target.name) || is_left(&hold.session())
        });
        // A node that no longer serves a lock tells its waiters so, unless the node is gone.
        self.ask_all(|call| {
            match call.phase {
                // One that pauses goes on by itself, or is about to end. A grant that is under way
                // is confirmed where the lock is.
                Phase::Asking | Phase::Pausing => false,
                Phase::Waiting { .. } if call.has_moved => true,
                // Its session never answers again, so it asks at the new node.
                Phase::Waiting { .. } | Phase::Refused => is_left(&call.session),
            }
        });
    }
}

impl Context {
    /// The slot of a hold has moved: the new node hears whose it is, and tells of its loss.
    pub(super) fn confirm_where_it_is(self: &Arc<Self>, hold: &Arc<Hold>) {
        self.router.request_refresh();
        renew::one(self, hold, Aim::Hold);
    }

    /// Asks for these calls. Each is looked at once more as it is asked for: another thread may
    /// have heard meanwhile that it is granted.
    fn ask_all(self: &Arc<Self>, which: impl Fn(&Call) -> bool) {
        for id in self.table.calls(&which) {
            self.ask_if(id, None, &which);
        }
    }

    /// In another life of the session each hold is renewed by its token, and each wait is asked for
    /// again, except a wait that began in this life.
    fn begins_anew(self: &Arc<Self>, session: &Arc<Session>, life: i64) {
        let is_over = |call: &Call| {
            Arc::ptr_eq(&call.session, session)
                && matches!(call.phase, Phase::Waiting { life: begun, .. } if begun != life)
        };
        self.ask_all(is_over);
        renew::all(self, |hold| hold.is_of(session));
    }

    /// Applies an event to the hold or the call that it names, and returns what the caller has to
    /// do next. After the end of a wait the call keeps later events for its next step.
    ///
    /// In one step: between two looks a call could become a hold, and neither would hear of it.
    fn subject(
        &self,
        state: &mut State,
        session: &Arc<Session>,
        life: i64,
        event: &Event,
        since: Option<Instant>,
    ) -> Option<Subject> {
        let slot = state.find(event)?;
        let hold = state.at(slot)?.hold.as_ref();
        if let Some(hold) = hold.filter(|hold| self.is_meant(hold, session, event)) {
            return hold.apply(event).then(|| Subject::Hold(Arc::clone(hold)));
        }
        let (id, call) = state.call_at(slot)?;
        if !Arc::ptr_eq(&call.session, session) {
            return None;
        }
        if let Phase::Waiting { .. } = call.phase {
            let next = self.apply_to_wait(call, event, since);
            if next.is_some() {
                // Events from now on belong to the next step, and are kept for it.
                call.phase = Phase::Pausing;
            }
            return Some(Subject::Call(id, next));
        }
        // The answer to the ACQUIRE will tell whether it is about this.
        call.early.push((life, event.clone()));
        None
    }

    /// The session by whose word it is held tells of it; or that of the node where its lock is by
    /// now, which may be yet to confirm it.
    fn is_meant(&self, hold: &Hold, session: &Arc<Session>, event: &Event) -> bool {
        let is_at_home = || self.router.is_home(session, &hold.target.name);
        hold.token == event.token && (hold.is_of(session) || is_at_home())
    }
}

impl Hold {
    /// An event that names this hold. Returns whether it tells that the slot has moved.
    pub(super) fn apply(&self, event: &Event) -> bool {
        match &event.what {
            What::Lost(reason) => _ = self.mark_gone(*reason),
            What::Wanted => self.is_wanted(),
            What::Granted | What::TimedOut(_) | What::Left | What::Failed(_) => {}
        }
        matches!(event.what, What::Failed(_))
    }
}

/// The next thing to do after an event.
enum Subject {
    /// Its slot has moved.
    Hold(Arc<Hold>),
    Call(CallId, Option<Next>),
}

/// A command pauses after this number of redirects, and then follows them again: a node that stood
/// still for a while may answer by now.
const HOPS: u32 = 5;
