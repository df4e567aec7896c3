//! Undoing a call: its waiter is called back, and what it may have been granted is given back.

use std::pin::pin;
use std::sync::Arc;

use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use crate::flows::{Call, Recall, State, release, renew};
use crate::ledger::Grant;
use crate::topology::{AttachedRoute, Node, Route};
use crate::wire::{Acquired, EventKind, Mode, Subject, request};
use crate::{Backoff, Error, task};

impl Call {
    /// Takes the waiter out of the queue and gives back what it may have been granted meanwhile.
    ///
    /// The CANCEL goes the way of the ACQUIRE, behind it: when it is carried out there is a waiter,
    /// a hold, or nothing, and nothing comes after it. An owner minted for this call then releases
    /// whatever it has. Another may have holds of its own: there only a grant that is told is given
    /// back, by the answer or by its event.
    ///
    /// As long as the session lives, so may the waiter: so this is tried until it is answered.
    pub(super) async fn withdraw(mut self, state: State) {
        if self.routes.is_empty() {
            return;
        }
        let silent = self.call_back().await;
        let Some(silent) = silent else { return };
        // Otherwise it listens first: left unheard, the news of this wait would be taken for that
        // of the owner's next one here.
        if !self.request.own {
            if self.hears_all(state, silent).await {
                return;
            }
            let key = self.usage.target.key();
            if let Some(at) = self.request.context.router.attached(key) {
                // Where it cannot be asked, what is left ends with its lease.
                let _ = self.undo_unheard_grant(&at).await;
            }
        }
        // It may have been granted, and the word of it lost. No token is known, so this would take
        // any hold of the owner: it is not sent where the owner has others, and what is left over
        // ends with its lease. Sent while it is still our turn, so that it takes nothing from the
        // owner's next wait.
        release::start(&self.request.context, self.usage, None, None);
        drop(self.permit);
    }

    /// Calls the waiter back until it is known to be out of the queue wherever it may stand: the
    /// nodes that may have something to tell. None if the client has gone, and so its session.
    async fn call_back(&mut self) -> Option<Vec<Arc<Node>>> {
        let mut silent = Vec::new();
        let mut backoff = Backoff::new();
        // Without the permit another call may be in the queue, and this one is not.
        while self.permit.is_some() && !self.routes.is_empty() {
            for (route, cancelled) in self.cancel().await {
                let router = &self.request.context.router;
                let is_told = match cancelled {
                    Ok(_) => true,
                    // The lock is elsewhere.
                    Err(error) if router.redirected(&error, &route).is_some() => true,
                    // A node that cannot be reached, and whose slots another has taken over, ends
                    // our session, and has nothing more to tell.
                    Err(_) if !router.is_home(&route.node, self.usage.target.key()) => false,
                    Err(_) => continue,
                };
                self.routes.retain(|other| !other.is_at(&route.node));
                silent.extend(is_told.then_some(route.node));
            }
            if self.routes.is_empty() {
                break;
            }
            sleep(backoff.next()).await;
            let context = &self.request.context;
            if Arc::strong_count(context) <= context.background.owed.len() {
                return None;
            }
        }
        Some(silent)
    }

    /// Asks all nodes at once where the waiter may stand, and hears how many it was there.
    async fn cancel(&self) -> Vec<(Route, Result<u64, Error>)> {
        let cancels = self.routes.iter().map(|route| {
            let answer = route.send(request::cancel(self.usage.target.subject()));
            async { (route.clone(), answer.await) }
        });
        join_all(cancels).await
    }

    /// Before the lock is asked for again: ONCE would mistake the hold of another call for ours, so
    /// beside others it is not sent; then what may still be in the queue must go first. It can only
    /// be ours: it is our turn.
    pub(super) async fn recall(&mut self, at: &AttachedRoute) -> Result<(), Error> {
        let beside_others = !self.routes.is_empty() && !self.usage.target.is_alone();
        if self.permit.is_none() || self.recall == Recall::BesideOthers && !beside_others {
            return Ok(());
        }
        self.begin(&at.route);
        let mut silent = Vec::new();
        for (route, cancelled) in self.cancel().await {
            let is_there = self.queued && route.is_at(&at.route.node);
            match cancelled {
                Ok(0) if self.recall != Recall::Unheard => {}
                Ok(_) => silent.push(route.node),
                // Where it may still stand it would be in its own way.
                Err(error) if is_there && error.is_unanswered() => {
                    self.recall = Recall::Unheard;
                    return Err(error);
                }
                Err(_) => {}
            }
        }
        self.take_back(silent).await;
        if self.recall == Recall::Unheard {
            self.recall = Recall::Always;
        }
        Ok(())
    }

    /// Gives several locks back that were granted with no word of it, for that may have gone with a
    /// connection. Beside other holds of the owner ONCE is not sent, and asked for again they would
    /// be held once more than there are guards.
    ///
    /// Whether they were granted shows at one that the owner does not hold otherwise. Were all of
    /// them held otherwise, there would have been no wait.
    pub(super) async fn undo_unheard_grant(&self, at: &AttachedRoute) -> Result<(), Error> {
        let target = &self.usage.target;
        if target.mode != Mode::Several || self.usage.target.is_alone() {
            return Ok(());
        }
        let name = target.alone_at(Instant::now()).next();
        let Some(name) = name else { return Ok(()) };
        let one = Subject {
            mode: Mode::Plain,
            names: std::slice::from_ref(name),
            ..target.subject()
        };
        let session = &at.route.node.session.name;
        let granted = request::renew(one, self.lease, None, session);
        if at.route.send(granted).await? {
            // Another call may have been granted one of them in between: that is not given back.
            let unnamed = target.unnamed_release();
            let turn = target.turn();
            let names: Vec<_> = target.alone_at(Instant::now()).cloned().collect();
            if names.is_empty() {
                unnamed.was_not_sent();
                return Ok(());
            }
            let left = Subject {
                names: &names,
                ..target.subject()
            };
            let released = at.route.send(request::release(left, None, None));
            drop(turn);
            released.await?;
            drop(unnamed);
        }
        Ok(())
    }

    /// Nothing of it is in a queue any more: gives back what it was granted before. Returns whether
    /// all was heard that there was to hear.
    async fn hears_all(&mut self, state: State, silent: Vec<Arc<Node>>) -> bool {
        let answer = match state {
            State::Confirm(Grant { token, .. }) => Ok(Acquired::Granted { token, count: 1 }),
            // It has come before that to the CANCEL.
            State::Asked(asked) => {
                let heard = asked.answer.await;
                if let Ok(Acquired::Granted { token, .. }) = heard.as_ref().map(|h| h.acquired) {
                    self.learnt(token, &asked.at);
                }
                heard.map(|heard| heard.acquired)
            }
            _ => Ok(Acquired::Queued),
        };
        match answer {
            Ok(Acquired::Granted { token, .. }) => self.give_back(token, Instant::now()),
            Ok(Acquired::NotHeld { .. }) => {}
            // It was not sent; one before it may have been carried out, of which no word came.
            Err(error) if !error.is_unknown() && !self.queued && !self.unheard => {}
            Ok(Acquired::Queued) | Err(_) => return self.take_back(silent).await,
        }
        true
    }

    /// The waiter has left the queue at these nodes: hears why, and gives back what it was granted.
    /// Of a grant that comes when nobody listens any more, only the first of several locks would be
    /// known.
    ///
    /// So it listens until each node has told of it, or has nothing to tell; at most for a lease,
    /// after which there is nothing to give back. Returns whether each has told: of a wait that was
    /// in the queue every node does, but that may be lost with the session connection.
    async fn take_back(&mut self, mut silent: Vec<Arc<Node>>) -> bool {
        let left = Instant::now();
        let mut over = pin!(sleep(self.lease));
        while !silent.is_empty()
            && let Some(permit) = &self.permit
        {
            let all_told = join_all(silent.iter().map(|node| node.session.all_told(left)));
            let told = tokio::select! {
                biased;
                told = permit.mailbox.next() => Some(told),
                // It may have been told between the two looks.
                _ = all_told => permit.mailbox.next_unread(),
                () = &mut over => return true,
            };
            let Some(told) = told else { return false };
            if let EventKind::Granted { token } = told.kind {
                self.give_back(token, told.since);
            }
            silent.retain(|node| node.session.number != told.by);
        }
        self.permit.is_some()
    }

    /// As if it had been held, and dropped; but nobody counts on it.
    pub(super) fn give_back(&self, token: u64, since: Instant) {
        let (target, context) = (&self.usage.target, &self.request.context);
        let mut usage = target.claim(self.usage.options);
        // What may have been released since stays in doubt.
        (usage.begun, usage.is_next) = (self.usage.begun, self.usage.is_next);
        // It goes on by itself.
        drop(release::give_back(context, usage, token, since));
        // It has set the lease of all its locks to what was asked for when the wait began.
        let others = target.guarded().into_vec();
        if target.mode == Mode::Several && !others.is_empty() {
            let confirming = renew::confirm(Arc::clone(context), others, || true);
            context.background.runtime.spawn(task(confirming));
        }
    }
}
