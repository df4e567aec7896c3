//! Bringing what the servers tell to whom it concerns.

use std::collections::HashSet;
use std::sync::Arc;

use futures_util::stream::{self, StreamExt};
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
            let lost = stream::iter(lost);
            tokio::spawn(async move {
                let verify = |(hold, reason)| verify(&self, hold, reason);
                lost.for_each_concurrent(renew::AT_ONCE, verify).await;
            });
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

/// Asks about a hold of which an event says that it is lost: that may be about an earlier hold of
/// the same owner, whose guard has gone since. What cannot be learned counts as lost; but in a
/// cluster the lock may have moved, and then the word of the node that it has left says nothing.
/// Its validity ends in any case, unless the node where it is confirms it.
pub(crate) async fn verify(context: &Context, hold: Arc<Hold>, reason: LostReason) {
    let mut backoff = Backoff::new();
    let now = Instant::now;
    while hold.lost(now()).is_none() {
        // Before it is asked, too: what was granted in between may have gone again.
        let is_meant = hold.is_surely_meant(now());
        let lease = |now| hold.kept(now);
        let told = renew::ask(
            &context.router,
            hold.target(),
            hold.token(),
            Aim::Hold,
            lease,
        );
        match told.await {
            Ok(told) if told.held && is_meant && hold.is_surely_meant(now()) => {
                // Whether it was lost meanwhile the guard will say.
                let _ = hold.renewed(true, &told.renewal, now());
                return;
            }
            Err(_) if context.router.are_several() => {}
            Ok(_) | Err(_) => return hold.lose(reason),
        }
        sleep(backoff.next()).await;
    }
}
