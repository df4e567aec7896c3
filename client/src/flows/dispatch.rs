//! Bringing what the servers tell to whom it concerns.

use std::collections::BTreeSet;
use std::sync::Arc;

use futures_util::stream::{self, StreamExt};
use tokio::time::{Instant, sleep};

use crate::flows::{Aim, Context, release, renew};
use crate::ledger::{Delivered, Hold};
use crate::topology::slot_of;
use crate::wire::{Attachment, Event, Listener, Mode, ServerId, Session};
use crate::{Backoff, LostReason, part, task};

impl Listener for Context {
    fn may_attach(&self, session: &Session, server: &ServerId) -> bool {
        self.router.may_attach(session, server)
    }

    fn told(self: Arc<Self>, session: &Session, events: Vec<Event>, since: Instant) {
        let mut lost = Vec::new();
        for event in events {
            let (ledger, now) = (&self.ledger, Instant::now());
            match ledger.deliver(event, since, session.number, now) {
                Delivered::Done => {}
                // The server is not asked: a RENEW would take the hold from the other session. If
                // its client did the same, they would never end.
                Delivered::Lost(holds, reason @ LostReason::Taken) => {
                    for hold in holds {
                        hold.lose(reason);
                    }
                }
                Delivered::Lost(holds, reason) => {
                    // Its owner has had one grant only, so it is meant; and until the server has
                    // said so once more, it would be handed on.
                    for kept in holds.iter().filter(|hold| hold.target.owner.is_kept()) {
                        kept.wanted.must_go_back();
                        kept.changed.notify_waiters();
                    }
                    lost.extend(holds.into_iter().map(|hold| (hold, reason)));
                }
                Delivered::Orphan { owner, name, token } => {
                    let given_back = release::give_back_any(Arc::clone(&self), owner, name, token);
                    self.background.spawn(given_back);
                }
            }
        }
        if !lost.is_empty() {
            let lost = stream::iter(lost);
            tokio::spawn(task(async move {
                let verify = |(hold, reason)| verify(Arc::clone(&self), hold, reason);
                lost.for_each_concurrent(renew::AT_ONCE, verify).await;
            }));
        }
    }

    fn attached(self: Arc<Self>, session: &Arc<Session>, attachment: &Arc<Attachment>) {
        let (session, attachment) = (Arc::clone(session), Arc::clone(attachment));
        tokio::spawn(task(async move {
            // Those of the locks that it serves, and of those that have gone there ahead of their
            // slot: these count on it though another node serves the slot.
            let depends = |hold: &Hold| {
                let home = || self.router.route(hold.target.key()).node;
                hold.attachment().is_of(&session) || home().session.number == session.number
            };
            // The others were granted or confirmed since.
            let is_earlier = |hold: &Hold| !Arc::ptr_eq(&hold.attachment(), &attachment);
            let holds = self.holds(|hold| depends(hold) && is_earlier(hold)).await;
            // Attached anew, it is all begun anew.
            let is_present = || session.is_attached_by(&attachment);
            renew::confirm(self, holds, is_present).await;
        }));
    }

    fn broken(&self) {
        self.router.request_refresh();
    }

    fn moved(self: Arc<Self>, slots: &BTreeSet<u16>) {
        let slots = slots.clone();
        tokio::spawn(task(async move {
            let has_moved = |hold: &Hold| slots.contains(&slot_of(hold.target.key()));
            let holds = self.holds(has_moved).await;
            renew::confirm(self, holds, || true).await;
        }));
    }

    fn counts_on(&self, session: &Session) -> bool {
        let mut holds = self.ledger.holds().flatten();
        holds.any(|hold| hold.attachment().is_of(session) && hold.lost(Instant::now()).is_none())
    }
}

/// Asks about a hold of which an event says that it is lost: that may be about an earlier hold of
/// the same owner, whose guard has gone since. What cannot be learned counts as lost; but in a
/// cluster the lock may have moved, and then the word of the node that it has left says nothing.
/// And while another command of the owner is under way, the answer may be about what that has
/// begun, or be over when that is carried out: then it is asked again. Its validity ends in any
/// case, unless it is confirmed.
pub(crate) async fn verify(context: Arc<Context>, hold: Arc<Hold>, reason: LostReason) {
    let mut backoff = Backoff::new();
    let now = Instant::now;
    let since = now();
    // In the pauses nothing is kept: the client may end with its last guard.
    let (context, hold) = (Arc::downgrade(&context), Arc::downgrade(&hold));
    while let (Some(context), Some(hold)) = (context.upgrade(), hold.upgrade())
        && hold.has_guards()
        && hold.lost(now()).is_none()
    {
        let before = hold.look(now());
        let lease = |now| hold.kept(now);
        let turn = hold.renewing.lock().await;
        let told = renew::ask_about(&context.router, &hold, Aim::Hold, lease).await;
        let is_held = told.as_ref().is_ok_and(|told| told.held);
        let has_tokens = || renew::has_tokens(&context.router, &hold, lease);
        let is_several = hold.target.mode == Mode::Several;
        let by_tokens = is_held && is_several && has_tokens().await.unwrap_or(false);
        drop(turn);
        let by_tokens = by_tokens && !hold.target.is_released_since(before.number);
        let is_meant = by_tokens.then_some(true);
        let is_meant = is_meant.or_else(|| hold.was_meant(&before, now()));
        match (told, is_meant) {
            (Ok(told), Some(true)) if is_held => {
                // Whether it was lost meanwhile the guard will say.
                let _ = hold.renewed(&told, now());
                return;
            }
            (Ok(_), None) if is_held => {}
            (Err(_), _) if context.router.are_several() => {}
            _ => return hold.lose(reason),
        }
        // A wait may be under way for hours: it is asked no more often than the hold is renewed.
        let longest = part(hold.options.lease, 3);
        drop((context, hold));
        sleep(since.elapsed().min(longest).max(backoff.next())).await;
    }
}
