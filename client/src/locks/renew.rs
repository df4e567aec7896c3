//! Renewing holds. It is the watchdog's work, and the one way back: in another life of the session,
//! or at another node, a hold is renewed by its token, with the session.

use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use tokio::sync::{OwnedMutexGuard, oneshot};
use tokio::time::{Instant, sleep, timeout};

use crate::error::{Error, ErrorKind, LostReason};
use crate::locks::held::{Report, tell};
use crate::locks::{Context, Hold};
use crate::topology::Route;
use crate::wire::reply::{read_by, read_renewed};
use crate::wire::{Manner, Outcome, Request, Sending, Tied, request};
use crate::{Backoff, TIMEOUT_MAX, metrics};

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
pub(crate) async fn ask(context: &Arc<Context>, hold: &Arc<Hold>, aim: Aim) -> Result<(), Error> {
    let (since, mut pauses) = (Instant::now(), Backoff::new());
    let limit = context.router.response_timeout;
    loop {
        // It does not stand in line: the turn could be given to a task that is never polled again.
        let later = || since.checked_add(TIMEOUT_MAX).unwrap_or(since);
        let free = || hold.turn().try_lock_owned().map_err(|_| later());
        let turn = timeout(limit, hold.until(free)).await;
        let busy = |_| context.trouble_or("an earlier renewal is not answered");
        let (report, outcome) = oneshot::channel();
        start(context, hold, aim, turn.map_err(busy)?, Some(report), None);
        match outcome.await.unwrap_or_else(|_| Err(Error::shut_down())) {
            // The session connection has broken, and is there again in a moment; or the lock is at
            // a node that the client has yet to find, or on its way there.
            Err(error)
                if (error.code.is_without_session() || error.code.is_misdirection())
                    && since.elapsed() < limit =>
            {
                if let Some(reason) = hold.lost(Instant::now()) {
                    return Err(Error::lost(reason));
                }
                sleep(pauses.next()).await;
            }
            told => return told.map_err(Error::misdirected),
        }
    }
}

/// Renews these, unless that is under way or they are lost. How that went the guards say.
pub(super) fn all(context: &Arc<Context>, which: impl Fn(&Arc<Hold>) -> bool) {
    for hold in context.table.holds(which) {
        one(context, &hold, Aim::Hold);
    }
}

/// The same for one hold. If a renewal is in flight, another follows its answer where necessary;
/// for [`Aim::Hold`] always: the server may have carried out the first before the slot moved.
pub(super) fn one(context: &Arc<Context>, hold: &Arc<Hold>, aim: Aim) {
    if !hold.has_guards() || hold.lost(Instant::now()).is_some() {
        return;
    }
    // Set before the turn is tried, and looked at after the turn was given back. In any other order
    // another thread could look too early, while this one finds the turn taken.
    if aim == Aim::Hold {
        hold.ask_again(true);
    }
    if let Ok(turn) = hold.turn().try_lock_owned() {
        start(context, hold, aim, turn, None, None);
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
    there: Option<Route>,
) {
    let now = Instant::now();
    hold.ask_again(false);
    let begins_anew = hold.options.renewed || aim == Aim::Anew;
    let length = hold.lease_to_ask(begins_anew, now);
    let is_sent_on = there.is_some();
    let home = || Route {
        node: context.router.home(&hold.target.name),
        asking: false,
    };
    let Route { node, asking } = there.unwrap_or_else(home);
    let wanted = hold.wanted.asks();
    let (target, session) = (&hold.target, &node.session);
    let is_wanted = wanted.is_some();
    let cmd = request::renew(target, length, hold.token, session.name(), is_wanted);
    let mut renewing = Renewing {
        context: Arc::downgrade(context),
        hold: Arc::clone(hold),
        aim,
        is_sent_on,
        turn: Some(turn),
        begins: begins_anew.then_some(length),
        wanted,
        report,
    };
    let Some(acknowledger) = node.acknowledger.as_ref().filter(|_| aim != Aim::Hold) else {
        let by_enough = node.acknowledger.is_none().then_some(Ok(()));
        let then = move |outcome| match outcome {
            Outcome::Overdue(error) => tell(&mut renewing.report, Err(error)),
            Outcome::Told(reply, sending) => {
                let is_held = read_by(reply, read_renewed);
                renewing.told(is_held.map(|is_held| (is_held, by_enough.clone())), sending);
            }
        };
        let request = Request::new(cmd, &target.name, Manner::Twice, then);
        return node.link.send(request.tying(Arc::<Hold>::clone(hold)));
    };
    let Some(confidence) = session.present() else {
        return renewing.told(Err(session.trouble().without_session()), None);
    };
    let sending = Sending {
        at: now,
        again: false,
        asking,
        session: Arc::clone(session),
        confidence,
    };
    hold.may_be_tied(&sending);
    let then = Box::new(move |answer: Result<_, _>| {
        let told = answer.and_then(|(is_held, by_enough)| {
            // A "no" behind ASKING is not believed, as by the link.
            let is_told = is_held || !asking;
            is_told
                .then_some((is_held, Some(by_enough)))
                .ok_or_else(Error::elsewhere)
        });
        renewing.told(told, Some(sending.clone()));
    });
    // If its task is gone, so is the runtime; the dropped callback then tells the caller.
    let _ = acknowledger.send((cmd, asking, then));
}

/// Whether it is held, and if the lease had to be acknowledged, whether enough copies have it.
type Renewed = (bool, Option<Result<(), Error>>);

/// A renewal that is under way.
struct Renewing {
    context: Weak<Context>,
    hold: Arc<Hold>,
    aim: Aim,
    /// Whether a node has named this one for it.
    is_sent_on: bool,
    /// One command is under way for a hold at a time.
    turn: Option<OwnedMutexGuard<()>>,
    /// The lease that begins with it, if one does.
    begins: Option<Duration>,
    /// Whether it asks to hear of other owners that want the lock, and how often it had heard.
    wanted: Option<u64>,
    report: Report,
}

impl Renewing {
    /// It was answered, and by whose word and since when the hold is confirmed.
    fn told(&mut self, answer: Result<Renewed, Error>, sending: Option<Sending>) {
        if let Err(error) = &answer
            && error.redirect().is_some()
            && let Some(context) = self.context.upgrade()
            && let Some(there) = context.router.redirected(error)
            && !self.is_sent_on
            && let Some(turn) = self.turn.take()
        {
            // The link would have followed it; this one waits for copies.
            let report = self.report.take();
            return start(&context, &self.hold, self.aim, turn, report, Some(there));
        }
        if self.begins.is_none() && answer.as_ref().is_err_and(Error::is_unknown) {
            self.hold.may_be_cut();
        }
        metrics::renewed(answer.as_ref().ok().map(|(is_held, _)| *is_held));
        if let (Some(_), Err(error)) = (self.wanted, &answer) {
            self.hold.wanted.failed(error);
        }
        let told = answer.and_then(|(is_held, acknowledged)| {
            let Some(sending) = sending.filter(|_| is_held) else {
                return Err(Error::lost(self.hold.mark_gone(LostReason::NotHeld)));
            };
            let (by_enough, now) = (acknowledged.as_ref(), Instant::now());
            let renewed = self.hold.renewed(self.begins, sending, by_enough, now);
            renewed.map_err(Error::lost)?;
            if self.aim == Aim::Anew && self.hold.is_fixed() {
                let why = "an earlier renewal may arrive yet, and leave the lease its former end";
                return Err(Error::new(ErrorKind::NotAcknowledged, why));
            }
            acknowledged.unwrap_or(Ok(()))
        });
        // Only now may another thread send the next one, which asks for the rest of the lease that
        // this one has begun: before, it would cut that.
        drop(self.turn.take());
        self.hold.changed.notify_waiters();
        if let Some(context) = self.context.upgrade() {
            self.follow_up(&context, &told);
        }
        tell(&mut self.report, told);
    }

    fn follow_up(&self, context: &Arc<Context>, told: &Result<(), Error>) {
        let (hold, error) = (&self.hold, told.as_ref().err());
        let is_held = error.is_none_or(Error::is_not_acknowledged);
        // The session has begun anew meanwhile, or somebody has begun to listen.
        let asks = hold.wanted.asks();
        let has_more = || hold.is_of_former_life() || asks.is_some() && asks != self.wanted;
        if hold.ask_again(false) || is_held && has_more() {
            one(context, hold, Aim::Hold);
        }
        let Some(error) = error.filter(|error| !error.is_lost()) else {
            return;
        };
        // A refusal is no word of a loss: the server may be loading, or out of memory. The guard
        // hears of it when its lease ends unconfirmed.
        let is_without = error.code.is_without_session();
        if is_without {
            hold.was_refused.store(true, Ordering::Relaxed);
            context.table.with(|state| state.has_refused = true);
        }
        // When a session answers, the hold is confirmed for it. A lease that must be acknowledged
        // is asked for by the watchdog alone.
        let is_durable = context.router.identity.durability.is_some();
        if hold.options.renewed && (!is_without || is_durable) {
            context.renewal_failed.notify_one();
        }
    }
}
