//! Renewing holds. It is the watchdog's work, and the one way back: in another life of the session,
//! or at another node, a hold is renewed by its token, with the session.

use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{OwnedMutexGuard, oneshot};
use tokio::time::{Instant, sleep, timeout};

use crate::error::{Error, LostReason};
use crate::locks::report::{Report, tell};
use crate::locks::{Context, CountsOn, Hold};
use crate::time::Lease;
use crate::wire::reply::{read_by, read_renewed};
use crate::wire::{Manner, Outcome, Request, request};
use crate::{Backoff, metrics};

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
            let limit = router.response_timeout;
            let turn = timeout(limit, Arc::clone(&hold.renewing).lock_owned()).await;
            let Ok(turn) = turn else {
                let busy = "an earlier renewal is not answered";
                return Err(router.trouble().unwrap_or_else(|| Error::unavailable(busy)));
            };
            let (report, outcome) = oneshot::channel();
            let Some(context) = context.upgrade() else {
                return Err(Error::shut_down());
            };
            start(&context, &hold, aim, turn, Some(report));
            drop(context);
            let told = outcome.await.unwrap_or_else(|_| Err(Error::shut_down()));
            match told {
                // The session connection has broken, and is there again in a moment.
                Err(error) if error.code().is_without_session() && since.elapsed() < limit => {
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

/// Sends the RENEW: on the connection that waits for copies, if the lease must be acknowledged.
/// It is handed over at once, so that many share one wait.
fn start(
    context: &Arc<Context>,
    hold: &Arc<Hold>,
    aim: Aim,
    turn: OwnedMutexGuard<()>,
    report: Report,
) {
    let now = Instant::now();
    let length = match aim {
        Aim::Anew => hold.lease_anew(now),
        Aim::Hold | Aim::Lease => hold.lease_kept(now),
    };
    let node = context.router.home(&hold.target.name);
    let wanted = hold.wanted.asks();
    let (target, session) = (&hold.target, &node.session);
    let (subject, is_wanted) = (target.subject(), wanted.is_some());
    let cmd = request::renew(subject, length, hold.token, session.name(), is_wanted);
    let mut renewing = Renewing {
        context: Arc::downgrade(context),
        hold: Arc::clone(hold),
        turn: Some(turn),
        length,
        wanted,
        report,
    };
    let Some(acknowledger) = node.acknowledger.as_ref().filter(|_| aim != Aim::Hold) else {
        let acknowledged = node.acknowledger.is_none().then_some(Ok(()));
        let then = Box::new(move |outcome| match outcome {
            Outcome::Overdue(error) => tell(renewing.report.take(), Err(error)),
            Outcome::Told(reply, sending) => {
                let sent = sending.map(|sending| (sending.at, CountsOn::from(&sending)));
                renewing.told(read_by(reply, read_renewed), sent, acknowledged.clone());
            }
        });
        let request = Request::new(cmd, &target.name, Manner::Twice, then);
        return node.link.send(request);
    };
    let Some(confidence) = session.present() else {
        return renewing.told(Err(session.trouble()), None, None);
    };
    let session = Arc::clone(session);
    let sent = Some((
        now,
        CountsOn {
            session,
            confidence,
        },
    ));
    let then = Box::new(move |answer| match answer {
        Ok((is_held, by_enough)) => renewing.told(Ok(is_held), sent, Some(by_enough)),
        Err(error) => renewing.told(Err(error), sent, None),
    });
    acknowledger.renew(cmd, then);
}

/// A renewal that is under way.
struct Renewing {
    context: Weak<Context>,
    hold: Arc<Hold>,
    /// One command is under way for a hold at a time.
    turn: Option<OwnedMutexGuard<()>>,
    length: Duration,
    /// Whether it asks to hear of other owners that want the lock, and how often it had heard.
    wanted: Option<u64>,
    report: Report,
}

impl Renewing {
    /// It was answered; by whose word and since when the hold is confirmed, and whether enough
    /// copies have it.
    fn told(
        &mut self,
        answer: Result<bool, Error>,
        sent: Option<(Instant, CountsOn)>,
        acknowledged: Option<Result<(), Error>>,
    ) {
        drop(self.turn.take());
        metrics::renewed(answer.as_ref().ok().copied());
        if let Some(before) = self.wanted {
            self.hold.wanted.answered(before, answer.as_ref().err());
        }
        let told =
            answer.and_then(|is_held| self.take_note(sent.filter(|_| is_held), acknowledged));
        self.hold.changed.notify_waiters();
        if let Some(context) = self.context.upgrade() {
            self.follow_up(&context, &told);
        }
        tell(self.report.take(), told);
    }

    fn take_note(
        &self,
        sent: Option<(Instant, CountsOn)>,
        acknowledged: Option<Result<(), Error>>,
    ) -> Result<(), Error> {
        let Some((since, counts_on)) = sent else {
            self.hold.mark_gone(LostReason::NotHeld);
            return Err(Error::lost(LostReason::NotHeld));
        };
        let (length, now) = (self.length, Instant::now());
        let lease = Lease { since, length };
        let renewed = self
            .hold
            .renewed(lease, counts_on, acknowledged.as_ref(), now);
        renewed.map_err(Error::lost)?;
        acknowledged.unwrap_or(Ok(()))
    }

    fn follow_up(&self, context: &Arc<Context>, told: &Result<(), Error>) {
        let hold = &self.hold;
        match told {
            Ok(()) => {
                // The session has begun anew meanwhile, or somebody has begun to listen.
                let listens = self.wanted.is_none() && hold.wanted.asks().is_some();
                if hold.is_of_former_life() || listens {
                    one(context, hold, Aim::Hold);
                }
            }
            Err(error) if error.is_lost() => {}
            Err(error) if error.code().is_without_session() => {
                hold.refused();
                context.table.with(|state| state.has_refused = true);
            }
            // A refusal is no word of a loss: the server may be loading, or out of memory. The
            // guard hears of it when its lease ends unconfirmed.
            Err(_) => context.renewal_failed.notify_one(),
        }
    }
}
