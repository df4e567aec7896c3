//! Renewing holds. It is the watchdog's work, and the one way back: in another life of the session,
//! or at another node, a hold is renewed by its token, with the session.

use std::sync::{Arc, Weak};

use tokio::sync::{OwnedMutexGuard, oneshot};
use tokio::time::{Instant, sleep};

use crate::error::{Error, LostReason};
use crate::locks::report::{Report, tell};
use crate::locks::{Context, CountsOn, Hold, Renewal};
use crate::time::Lease;
use crate::topology::Node;
use crate::wire::reply::{read_by, read_renewed};
use crate::wire::{Manner, Outcome, Request, Sending, Session, request};
use crate::{Backoff, metrics, task};

/// The purpose of a renewal. It matters only with [`Acknowledger`]; without one, `Hold` and `Lease`
/// are the same.
///
/// [`Acknowledger`]: crate::wire::Acknowledger
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aim {
    /// The server's word that it is held, for the present session. It comes at once, however slow
    /// the replicas are, and the lease ends as before.
    Hold,
    /// A lease that counts, once enough have it; one of its own goes on to its end.
    Lease,
    /// The same, and the lease begins anew in any case.
    Anew,
}

/// One command is under way for a hold at a time.
type Turn = OwnedMutexGuard<()>;

/// Renews a hold, and takes note of that: why not, if it is not so now.
pub(crate) fn ask(
    context: &Arc<Context>,
    hold: &Arc<Hold>,
    aim: Aim,
) -> impl Future<Output = Result<(), Error>> + use<> {
    let (context, hold) = (Arc::downgrade(context), Arc::clone(hold));
    async move {
        let (since, mut pauses) = (Instant::now(), Backoff::new());
        loop {
            let Some(router) = context.upgrade().map(|one| Arc::clone(&one.router)) else {
                return Err(Error::shut_down());
            };
            let timeout = router.response_timeout;
            let turn = tokio::time::timeout(timeout, Arc::clone(&hold.renewing).lock_owned());
            let Ok(turn) = turn.await else {
                let busy = "an earlier renewal is not answered";
                return Err(router.trouble().unwrap_or_else(|| Error::unavailable(busy)));
            };
            let Some(context) = context.upgrade() else {
                return Err(Error::shut_down());
            };
            let (report, outcome) = oneshot::channel();
            start(&context, &hold, aim, turn, Some(report));
            drop(context);
            let told = outcome.await.unwrap_or_else(|_| Err(Error::shut_down()));
            match told {
                // The session connection has broken, and is there again in a moment.
                Err(error) if error.code().is_without_session() && since.elapsed() < timeout => {
                    sleep(pauses.next()).await;
                }
                told => return told,
            }
        }
    }
}

/// Renews these, unless that is under way or they are lost. How that went the guards say.
pub(super) fn all(context: &Arc<Context>, holds: Vec<Arc<Hold>>) {
    for hold in holds {
        one(context, &hold, Aim::Hold);
    }
}

/// The same for one hold. If a renewal is in flight, its reply renews again where necessary.
pub(super) fn one(context: &Arc<Context>, hold: &Arc<Hold>, aim: Aim) {
    let is_over = !hold.has_guards() || hold.lost(Instant::now()).is_some();
    if !is_over && let Ok(turn) = Arc::clone(&hold.renewing).try_lock_owned() {
        start(context, hold, aim, turn, None);
    }
}

fn start(context: &Arc<Context>, hold: &Arc<Hold>, aim: Aim, turn: Turn, report: Report) {
    let now = Instant::now();
    let lease = match aim {
        Aim::Anew => hold.lease_anew(now),
        Aim::Hold | Aim::Lease => hold.lease_kept(now),
    };
    let lease = Lease {
        since: now,
        length: lease,
    };
    let node = context.router.home(&hold.target.name);
    if node.acknowledger.is_some() && aim != Aim::Hold {
        let renewing = acknowledged(&node, Arc::clone(hold), lease);
        let (context, hold) = (Arc::clone(context), Arc::clone(hold));
        context.background.runtime.clone().spawn(task(async move {
            let renewed = renewing.await;
            // Released first: the follow-up may start the next renewal, which needs it.
            drop(turn);
            follow_up(&context, &hold, &node.session, &renewed);
            tell(report, renewed);
        }));
        return;
    }
    let counts = node.acknowledger.is_none();
    send(context, &node, hold, lease, counts, turn, report);
}

fn send(
    context: &Arc<Context>,
    node: &Node,
    hold: &Arc<Hold>,
    lease: Lease,
    counts: bool,
    turn: Turn,
    mut report: Report,
) {
    let wanted = hold.wanted.is_asked();
    let (target, session) = (&hold.target, &node.session.name);
    let cmd = request::renew(target.subject(), lease.length, hold.token, session, wanted);
    let (context, kept) = (Arc::downgrade(context), Arc::downgrade(hold));
    let mut turn = Some(turn);
    let then = Box::new(move |outcome| match outcome {
        Outcome::Overdue(error) => tell(report.take(), Err(error)),
        Outcome::Told(reply, sending) => {
            drop(turn.take());
            let renewed = read_by(reply, read_renewed);
            let Some(hold) = Weak::upgrade(&kept) else {
                return;
            };
            metrics::renewed(renewed.as_ref().ok().copied());
            let asked = sending.as_ref().map(|sending| Arc::clone(&sending.session));
            let told = match renewed {
                Ok(is_held) => took_note(&hold, is_held, sending, lease, counts),
                Err(error) => Err(error),
            };
            if let Some(context) = Weak::upgrade(&context) {
                let asked = asked.unwrap_or_else(|| hold.counts_on().session);
                follow_up(&context, &hold, &asked, &told);
            }
            tell(report.take(), told);
        }
    });
    node.link
        .send(Request::new(cmd, &hold.target.name, Manner::Twice, then));
}

fn took_note(
    hold: &Hold,
    is_held: bool,
    sending: Option<Sending>,
    lease: Lease,
    counts: bool,
) -> Result<(), Error> {
    let Some(sending) = sending.filter(|_| is_held) else {
        hold.mark_gone(LostReason::NotHeld);
        return Err(Error::lost(LostReason::NotHeld));
    };
    let confidence = sending.confidence();
    let renewal = Renewal {
        lease: Lease {
            since: sending.at,
            ..lease
        },
        counts_on: CountsOn {
            session: sending.session,
            confidence,
        },
        acknowledged: counts.then_some(Ok(())),
    };
    hold.renewed(&renewal, Instant::now()).map_err(Error::lost)
}

/// The next step after a renewal.
fn follow_up(
    context: &Arc<Context>,
    hold: &Arc<Hold>,
    asked: &Arc<Session>,
    told: &Result<(), Error>,
) {
    match told {
        Ok(()) => {
            // The session has begun anew meanwhile.
            if hold.is_of_former_life() {
                one(context, hold, Aim::Hold);
            }
        }
        Err(error) if error.is_lost() => {}
        Err(error) if error.code().is_without_session() => {
            context
                .table
                .with(|state| state.renew_with_session(hold, asked));
        }
        // A refusal is no word of a loss: the server may be loading, or out of memory. The guard
        // hears of it when its lease ends unconfirmed.
        Err(_) => context.watchdog.has_failed(Instant::now()),
    }
}

/// Renews a hold on the connection that waits for copies. It is handed over at once, so that many
/// share one wait.
fn acknowledged(
    node: &Node,
    hold: Arc<Hold>,
    lease: Lease,
) -> impl Future<Output = Result<(), Error>> + use<> {
    let session = Arc::clone(&node.session);
    let (target, wanted) = (&hold.target, hold.wanted.is_asked());
    let cmd = request::renew(
        target.subject(),
        lease.length,
        hold.token,
        &session.name,
        wanted,
    );
    let asked = session.present().zip(node.acknowledger.as_ref());
    let asked = asked.map(|(confidence, acknowledger)| (confidence, acknowledger.renew(cmd)));
    async move {
        let Some((confidence, answer)) = asked else {
            return Err(session.trouble());
        };
        let answer = answer.await;
        metrics::renewed(answer.as_ref().ok().map(|(held, _)| *held));
        answer.and_then(|(held, by_enough)| {
            if !held {
                hold.mark_gone(LostReason::NotHeld);
                return Err(Error::lost(LostReason::NotHeld));
            }
            let renewal = Renewal {
                lease,
                counts_on: CountsOn {
                    session,
                    confidence,
                },
                acknowledged: Some(by_enough.clone()),
            };
            hold.renewed(&renewal, Instant::now())
                .map_err(Error::lost)?;
            by_enough
        })
    }
}
