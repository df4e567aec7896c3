//! Bringing what the servers tell to whom it concerns.

use std::collections::HashSet;
use std::sync::Arc;

use tokio::time::{Instant, sleep};

use crate::backoff::Backoff;
use crate::flows::Context;
use crate::flows::renew::{self, Aim};
use crate::ledger::{Delivered, GiveBack, Hold};
use crate::lost_reason::LostReason;
use crate::topology::slots::slot_of;
use crate::topology::{Listener, Node};
use crate::wire::reply::Event;
use crate::wire::session::Attachment;

impl Listener for Context {
    fn told(self: Arc<Self>, node: &Arc<Node>, events: Vec<Event>, since: Instant) {
        let mut lost = Vec::new();
        for event in events {
            match self
                .ledger
                .deliver(event, since, node.number, Instant::now())
            {
                Delivered::Done => {}
                Delivered::Lost(holds, reason) => {
                    lost.extend(holds.into_iter().map(|hold| (hold, reason)));
                }
                Delivered::Orphan(orphan) => Arc::clone(&self).give_back(orphan),
            }
        }
        if !lost.is_empty() {
            tokio::spawn(async move { verify(&self, lost).await });
        }
    }

    fn attached(self: Arc<Self>, node: &Arc<Node>, attachment: &Arc<Attachment>) {
        let mut holds = self.holds_at(node);
        // The others were granted or confirmed since.
        holds.retain(|hold| !hold.counts_on(attachment));
        if holds.is_empty() {
            return;
        }
        // Attached anew, it is all begun anew.
        let (session, attachment) = (Arc::clone(&node.session), Arc::clone(attachment));
        let is_present = move || {
            let present = session.attachment();
            present.is_some_and(|present| Arc::ptr_eq(&present, &attachment))
        };
        tokio::spawn(async move { renew::confirm(&self, holds, is_present).await });
    }

    fn broken(&self) {
        self.router.request_refresh();
    }

    fn over(&self, node: &Arc<Node>, reason: LostReason) {
        for hold in self.holds_at(node) {
            hold.lose(reason);
        }
    }

    fn moved(self: Arc<Self>, slots: &HashSet<u16>) {
        let mut holds = self.ledger.holds();
        holds.retain(|hold| slots.contains(&slot_of(hold.target().key())));
        tokio::spawn(async move { renew::confirm(&self, holds, || true).await });
    }

    fn counts_on(&self, attachment: &Attachment) -> bool {
        let holds = self.ledger.holds();
        holds.iter().any(|hold| hold.counts_on(attachment))
    }
}

impl Context {
    fn holds_at(&self, node: &Arc<Node>) -> Vec<Arc<Hold>> {
        let mut holds = self.ledger.holds();
        holds.retain(|hold| self.router.is_home(node, hold.target().key()));
        holds
    }
}

/// Asks about holds of which an event says that they are lost: it may be about an earlier hold of
/// the same owner, whose guard has gone since. What cannot be learned counts as lost; but in a
/// cluster the lock may have moved, and then the word of the node that it has left says nothing.
pub(crate) async fn verify(context: &Arc<Context>, lost: Vec<(Arc<Hold>, LostReason)>) {
    let mut backoff = Backoff::new();
    let mut lost = lost;
    loop {
        let holds = lost.iter().map(|(hold, _)| Arc::clone(hold)).collect();
        for (route, holds) in renew::by_route(&context.router, holds) {
            // Before it is asked, too: what was granted in between may have gone again.
            let meant: Vec<_> = holds
                .iter()
                .filter(|hold| hold.is_surely_meant(Instant::now()))
                .cloned()
                .collect();
            let is_meant = |hold: &_| {
                meant.iter().any(|one| Arc::ptr_eq(one, hold))
                    && hold.is_surely_meant(Instant::now())
            };
            for (hold, told) in renew::ask(&context.router, route, holds, Aim::Hold).await {
                match told {
                    Ok((true, renewal)) if is_meant(&hold) => {
                        // Whether it was lost meanwhile the guard will say.
                        let _ = hold.renewed(true, &renewal, Instant::now());
                    }
                    Err(_) if context.router.are_several() => continue,
                    Ok(_) | Err(_) => lose(&hold, &lost),
                }
                lost.retain(|(one, _)| !Arc::ptr_eq(one, &hold));
            }
        }
        // Its validity ends in any case, unless the node where it is confirms it.
        lost.retain(|(hold, _)| hold.lost(Instant::now()).is_none());
        if lost.is_empty() {
            return;
        }
        sleep(backoff.next()).await;
    }
}

/// With the reason that the server gave.
fn lose(hold: &Arc<Hold>, lost: &[(Arc<Hold>, LostReason)]) {
    let said = lost.iter().find(|(one, _)| Arc::ptr_eq(one, hold));
    hold.lose(said.map_or(LostReason::NotHeld, |(_, reason)| *reason));
}
