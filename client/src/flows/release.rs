//! Giving a hold back, and seeing to it that the server knows.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use crate::backoff::Backoff;
use crate::error::Error;
use crate::flows::Context;
use crate::ledger::{GiveBack, Hold, OrphanGrant, Usage};
use crate::lost_reason::LostReason;
use crate::topology::{MAX_REDIRECTS, Route};
use crate::trace;
use crate::wire::commands::Answer;
use crate::wire::reply::Released;
use crate::wire::request::{self, Command, Mode};

/// Sends RELEASE at once and leaves the rest to the background.
pub(crate) fn in_background(context: &Arc<Context>, usage: Usage, hold: Option<Arc<Hold>>) {
    start(context, usage, hold, None);
}

/// As [`in_background`], and tells how it went: after the second try at the latest, while the
/// background goes on trying.
pub(crate) fn told(
    context: &Arc<Context>,
    usage: Usage,
    hold: Arc<Hold>,
) -> oneshot::Receiver<Result<(), Error>> {
    let (report, outcome) = oneshot::channel();
    start(context, usage, Some(hold), Some(report));
    outcome
}

type Report = oneshot::Sender<Result<(), Error>>;

fn start(context: &Arc<Context>, usage: Usage, hold: Option<Arc<Hold>>, report: Option<Report>) {
    let mut release = Release {
        context: Arc::clone(context),
        usage,
        hold,
    };
    if !release.names_its_token() {
        release.usage.is_released_unnamed();
    }
    let route = context.router.route(release.usage.target().key());
    let target = release.usage.target();
    let span = trace::release(target, target.owner(), target.mode());
    if !release.takes_nothing_else() {
        let token = release.hold.as_ref().map(|hold| hold.token());
        if let Some(token) = token {
            remains(context, &release.usage, token);
        }
        return release.go_on(route, None, report, span);
    }
    // Sent here and not in a task, so that an ACQUIRE which the caller sends next comes after. A
    // word that ends it is heard where it arrives; only what is left otherwise is a task.
    let pending = context.background.counted();
    let there = route.clone();
    route.send_then(release.command(), move |answer| {
        match answer {
            Ok(released) => release.end(released, false, report),
            Err(_) => release.go_on(there, Some(Answer::told(answer)), report, span),
        }
        drop(pending);
    });
}

/// Of several locks whose hold is lost, or may be: gives back those that are still held by the
/// grant with this token. The command for several names no token, and that for one does. What was
/// entered again has another: it ends with its lease.
pub(crate) fn remains(context: &Arc<Context>, usage: &Usage, token: u64) {
    let target = usage.target();
    if target.mode() == Mode::Several {
        for orphan in OrphanGrant::each(target.subject(), token) {
            Arc::clone(context).give_back(orphan);
        }
    }
}

struct Release {
    context: Arc<Context>,
    /// Kept until the end: while it lives, no ACQUIRE of the same owner is taken for alone, and
    /// so none can be swept away by a RELEASE that is sent again.
    usage: Usage,
    hold: Option<Arc<Hold>>,
}

impl Release {
    /// The command, with a lease for what is left of a reader's hold. Each entry of a reader has an
    /// end of its own, and the last to come goes first: the others might end earlier than their
    /// guards count on.
    fn command(&self) -> Command<Released> {
        let target = self.usage.target();
        let hold = self.hold.as_ref();
        let token = hold.map(|hold| hold.token());
        let left = hold.filter(|_| target.mode() == Mode::Read);
        let lease = left.map(|hold| {
            let lease = hold.anew(Instant::now());
            let length = lease.lease.length;
            lease.keep();
            length
        });
        request::release(target.subject(), token, lease)
    }

    fn names_its_token(&self) -> bool {
        self.hold.is_some() && self.usage.target().mode().has_token()
    }

    /// Whether it cannot take another hold than the one that it is meant for: the server tells by
    /// the token, there is no other, or this one has not been lost. Otherwise it is not sent, and
    /// what may be left ends with its lease.
    fn takes_nothing_else(&self) -> bool {
        let named = self.usage.target().mode().has_token();
        let meant = |hold: &Arc<Hold>| named || hold.lost(Instant::now()).is_none();
        self.hold.as_ref().is_some_and(meant) || self.usage.is_alone()
    }

    fn go_on(
        self,
        route: Route,
        first: Option<Answer<Released>>,
        report: Option<Report>,
        span: trace::Span,
    ) {
        let context = Arc::clone(&self.context);
        context
            .background
            .spawn(async move { span.around(self.run(route, first, report)).await });
    }

    async fn run(
        self,
        mut route: Route,
        first: Option<Answer<Released>>,
        mut report: Option<Report>,
    ) {
        let started = Instant::now();
        let mut backoff = Backoff::new();
        let mut unknown = false;
        let mut next = first;
        let mut tries: u32 = 1;
        loop {
            let Some(answer) = next else {
                let reason = self
                    .hold
                    .as_ref()
                    .and_then(|hold| hold.lost(Instant::now()));
                drop(self);
                let lost = Error::lost(reason.unwrap_or(LostReason::NotHeld));
                return tell(&mut report, Err(lost));
            };
            let error = match answer.await {
                Ok(released) => return self.end(released, unknown, report),
                Err(error) => error,
            };
            unknown |= error.is_unknown();
            let router = &self.context.router;
            let there = router.redirected(&error, &route);
            let again = there.is_some()
                || error.is_unavailable()
                || error.is_unknown() && self.usage.is_alone();
            // After a lease the server has ended the hold by itself.
            if !again || started.elapsed() >= self.usage.options().lease {
                drop(self);
                return tell(&mut report, Err(error));
            }
            // Two nodes that have not yet heard of a move send us to each other.
            if tries > if there.is_some() { MAX_REDIRECTS } else { 1 } {
                tell(&mut report, Err(error.misdirected()));
                sleep(backoff.next()).await;
            }
            tries = tries.saturating_add(1);
            route = there.unwrap_or_else(|| router.route(self.usage.target().key()));
            next = self
                .takes_nothing_else()
                .then(|| route.send(self.command()));
        }
    }

    /// Tells what the server said.
    fn end(self, released: Released, unknown: bool, mut report: Option<Report>) {
        let outcome = self.outcome(released, unknown);
        // The server knows it by its token: nor do the other guards of this hold have it.
        if let Some(hold) = self.hold.as_ref().filter(|_| self.names_its_token())
            && released == Released::NotHeld
            && !unknown
        {
            hold.lose(LostReason::NotHeld);
        }
        // Before the caller is told, so that what it asks next finds the owner free.
        drop(self);
        tell(&mut report, outcome);
    }

    /// What an answered RELEASE means. "Not held" after a try whose reply was lost is that try's
    /// own doing, if the lease cannot have run out in between.
    fn outcome(&self, released: Released, unknown: bool) -> Result<(), Error> {
        let lost = self
            .hold
            .as_ref()
            .and_then(|hold| hold.lost(Instant::now()));
        match (released, lost) {
            (Released::Done, _) => Ok(()),
            (Released::NotHeld, None) if unknown => Ok(()),
            (Released::NotHeld, Some(_)) if unknown => Err(Error::no_reply(None)),
            (Released::NotHeld, lost) => Err(Error::lost(lost.unwrap_or(LostReason::NotHeld))),
        }
    }
}

fn tell(report: &mut Option<Report>, outcome: Result<(), Error>) {
    if let Some(report) = report.take() {
        // Whoever dropped unlock() does not want to know.
        let _ = report.send(outcome);
    }
}
