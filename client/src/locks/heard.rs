//! Applies events and new lives of a session.

use std::collections::BTreeSet;
use std::sync::Arc;

use tokio::time::{Instant, sleep};

use crate::error::{Code, Error};
use crate::locks::acquire::Next;
use crate::locks::{CallId, Context, Hold, Phase, State, renew};
use crate::topology::{Moves, slot_of};
use crate::wire::{Event, Listener, News, Request, Session, What};
use crate::{Backoff, task};

impl Listener for Context {
    fn heard(&self, session: &Arc<Session>, news: News) {
        let Some(this) = self.this.upgrade() else {
            return;
        };
        if news.is_new {
            this.begins_anew(session, news.life);
        }
        // Marks all lost holds before any guard is notified: a caller that hears of one lost lock
        // may ask for several at once, and must not share a hold that is lost as well.
        for event in &news.events {
            if let (Some(hold), What::Lost(reason)) = (this.hold_of(session, event), &event.what) {
                hold.mark_gone_silently(*reason);
            }
        }
        for event in &news.events {
            this.hears(session, event, news.since);
        }
        let calls = this.table.with(|state| state.calls_with_session(session));
        for id in calls {
            this.ask(id, None);
        }
        let holds = this.table.with(|state| state.holds_with_session(session));
        renew::all(&this, holds);
    }

    fn broken(&self, session: &Arc<Session>) {
        self.router.request_refresh();
        if let Some(this) = self.this.upgrade() {
            this.give_up_unheard(session);
        }
    }

    fn redirected(&self, session: &Arc<Session>, mut request: Request, error: Error) {
        let there = self.router.redirected(&error);
        let is_lost = request.expected.hops > HOPS;
        if let Some(route) = there.filter(|_| !is_lost) {
            request = request.asking(route.asking);
            return route.node.link.send(request);
        }
        let name = Arc::clone(&request.expected.name);
        if error.code() == Code::Elsewhere && !self.router.is_home(session, &name) {
            return self.router.home(&name).link.send(request.asking(false));
        }
        // Nobody knows yet, or two that have not yet heard of a move send it to each other.
        let context = self.this.clone();
        self.background.runtime.spawn(task(async move {
            sleep(Backoff::after(request.expected.hops)).await;
            match context.upgrade() {
                Some(context) => context.router.home(&name).link.send(request.asking(false)),
                None => request.fail(Error::shut_down()),
            }
        }));
    }

    fn is_home(&self, session: &Arc<Session>, name: &[u8]) -> bool {
        self.router.is_home(session, name)
    }
}

impl Moves for Context {
    fn moved(self: Arc<Self>, slots: &BTreeSet<u16>) {
        let has_moved = |name: &[u8]| slots.contains(&slot_of(name));
        let is_left = |session: &Session| session.is_retired();
        let holds = self
            .table
            .holds(|hold| has_moved(&hold.target.name) || is_left(&hold.counts_on().session));
        renew::all(&self, holds);
        // A node that no longer serves a lock tells its waiters so, unless the node is gone.
        let calls: Vec<_> = self.table.with(|state| {
            let asks = |phase: &Phase| matches!(phase, Phase::Asking);
            let calls = state.calls().filter(|(_, call)| !asks(&call.phase));
            let moved = calls.filter(|(_, call)| {
                let first = call.names.first();
                let is_elsewhere = |first: &Arc<[u8]>| {
                    has_moved(first) && !self.router.is_home(&call.session, first)
                };
                let is_waiting = matches!(call.phase, Phase::Waiting { .. });
                is_left(&call.session) || is_waiting && first.is_some_and(is_elsewhere)
            });
            moved.map(|(id, _)| id).collect()
        });
        for id in calls {
            self.ask(id, None);
        }
    }
}

impl Context {
    /// In another life of the session each hold is renewed by its token, and each wait is asked for
    /// again, except a wait that began in this life. Kept events of the former life are dropped.
    fn begins_anew(self: &Arc<Self>, session: &Arc<Session>, life: i64) {
        let mut waits = Vec::new();
        self.table.with(|state| {
            for (id, call) in state
                .calls()
                .filter(|(_, call)| Arc::ptr_eq(&call.session, session))
            {
                call.early.clear();
                match call.phase {
                    Phase::Waiting { life: begun, .. } if begun != life => waits.push(id),
                    _ => {}
                }
            }
        });
        for id in waits {
            self.ask(id, None);
        }
        renew::all(self, self.table.holds(|hold| hold.is_of(session)));
    }

    fn hears(self: &Arc<Self>, session: &Arc<Session>, event: &Event, since: Option<Instant>) {
        // In one step: between two looks a call could become a hold, and neither would hear of it.
        let (hold, next) = self.table.with(|state| {
            let Some(slot) = state.find(event) else {
                return (None, None);
            };
            if let Some(hold) = state
                .hold(slot)
                .filter(|hold| self.is_meant(hold, session, event))
            {
                return (Some(Arc::clone(hold)), None);
            }
            (None, self.apply_to_call(state, slot, session, event, since))
        });
        if let Some(hold) = hold {
            match &event.what {
                What::Failed(_) => {
                    // Its slot has moved.
                    self.router.request_refresh();
                    renew::all(self, vec![hold]);
                }
                _ => hold.apply(event),
            }
        }
        if let Some((id, next)) = next {
            self.go_on(id, next);
        }
    }

    fn apply_to_call(
        self: &Arc<Self>,
        state: &mut State,
        slot: usize,
        session: &Arc<Session>,
        event: &Event,
        since: Option<Instant>,
    ) -> Option<(CallId, Next)> {
        let (id, call) = state.call_at(slot)?;
        if !Arc::ptr_eq(&call.session, session) {
            return None;
        }
        if let Phase::Waiting { .. } = call.phase {
            return Some((id, self.apply_to_wait(state, id, event, since)));
        }
        // The answer to the ACQUIRE will tell whether it is about this.
        call.early.push(event.clone());
        None
    }
}

impl Context {
    /// The hold that an event names.
    fn hold_of(&self, session: &Arc<Session>, event: &Event) -> Option<Arc<Hold>> {
        self.table.with(|state| {
            let hold = state.hold(state.find(event)?)?;
            self.is_meant(hold, session, event)
                .then(|| Arc::clone(hold))
        })
    }

    /// The session by whose word it is held tells of it; or that of the node where its lock is by
    /// now, which may be yet to confirm it.
    fn is_meant(&self, hold: &Hold, session: &Arc<Session>, event: &Event) -> bool {
        let is_at_home = || self.router.is_home(session, &hold.target.name);
        hold.token == event.token && (hold.is_of(session) || is_at_home())
    }
}

impl Hold {
    /// An event that names this hold.
    pub(super) fn apply(&self, event: &Event) {
        match &event.what {
            What::Lost(reason) => self.mark_gone(*reason),
            What::Wanted => self.is_wanted(),
            What::Granted | What::TimedOut { .. } | What::Left | What::Failed(_) => {}
        }
    }
}

/// How often in a row nodes may redirect a command without a pause.
const HOPS: u32 = 5;
