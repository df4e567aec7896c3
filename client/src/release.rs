//! Giving a hold back, and seeing to it that the server knows.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use crate::backoff::Backoff;
use crate::client::Core;
use crate::command::{self, Command, Released};
use crate::driver::Answer;
use crate::error::Error;
use crate::hold::{Hold, LostReason};
use crate::mode::Mode;
use crate::nodes::{HOPS, Site};
use crate::owner::Claim;
use crate::registry::Stray;
use crate::trace;

/// Sends RELEASE at once and leaves the rest to the background.
pub(crate) fn in_background(core: &Arc<Core>, claim: Claim, hold: Option<Arc<Hold>>) {
    start(core, claim, hold, None);
}

/// As [`in_background`], and tells how it went: after the second try at the latest, while the
/// background goes on trying.
pub(crate) fn told(
    core: &Arc<Core>,
    claim: Claim,
    hold: Arc<Hold>,
) -> oneshot::Receiver<Result<(), Error>> {
    let (report, outcome) = oneshot::channel();
    start(core, claim, Some(hold), Some(report));
    outcome
}

type Report = oneshot::Sender<Result<(), Error>>;

fn start(core: &Arc<Core>, claim: Claim, hold: Option<Arc<Hold>>, report: Option<Report>) {
    let release = Release {
        core: Arc::clone(core),
        claim,
        hold,
    };
    let site = core.nodes.site(release.claim.target());
    let span = trace::release(release.claim.target());
    if !release.takes_nothing_else() {
        release.give_back_by_token();
        return release.go_on(site, None, report, span);
    }
    // Sent here and not in a task, so that an ACQUIRE which the caller sends next comes after. A
    // word that ends it is heard where it arrives; only what is left otherwise is a task.
    let pending = core.background.counted();
    let there = site.clone();
    site.send_then(release.command(), move |answer| {
        match answer {
            Ok(released) => release.end(released, false, report),
            Err(_) => release.go_on(there, Some(Answer::told(answer)), report, span),
        }
        drop(pending);
    });
}

struct Release {
    core: Arc<Core>,
    /// Kept until the end: while it lives, no ACQUIRE of the same owner is taken for alone, and
    /// so none can be swept away by a RELEASE that is sent again.
    claim: Claim,
    hold: Option<Arc<Hold>>,
}

impl Release {
    /// The command, with a lease for what is left of a reader's hold. Each entry of a reader has an
    /// end of its own, and the last to come goes first: the others might end earlier than their
    /// guards count on.
    fn command(&self) -> Command<Released> {
        let target = self.claim.target();
        let hold = self.hold.as_ref();
        let token = hold.map(|hold| hold.token());
        let left = hold.filter(|_| target.mode() == Mode::Read);
        let lease = left.map(|hold| {
            let lease = hold.anew();
            let length = lease.lease.length;
            lease.keep();
            length
        });
        command::release(target.subject(), token, lease)
    }

    /// Whether it cannot take another hold than the one that it is meant for: the server tells by
    /// the token, there is no other, or this one has not been lost. Otherwise it is not sent, and
    /// what may be left ends with its lease.
    fn takes_nothing_else(&self) -> bool {
        let named = self.claim.target().mode().has_token();
        let meant = |hold: &Arc<Hold>| named || hold.lost().is_none();
        self.claim.is_alone() || self.hold.as_ref().is_some_and(meant)
    }

    /// Of several locks whose hold may be lost, beside others of the owner: gives back those that
    /// are still held by this grant. The command for several names no token, and that for one does.
    /// What was entered again has another: it ends with its lease.
    fn give_back_by_token(&self) {
        let target = self.claim.target();
        let several = self.hold.as_ref();
        let Some(hold) = several.filter(|_| target.mode() == Mode::Several) else {
            return;
        };
        for stray in Stray::each(target.subject(), hold.token()) {
            self.core.nodes.give_back(stray);
        }
    }

    fn go_on(
        self,
        site: Site,
        first: Option<Answer<Released>>,
        report: Option<Report>,
        span: trace::Span,
    ) {
        let core = Arc::clone(&self.core);
        core.background
            .spawn(async move { span.around(self.run(site, first, report)).await });
    }

    async fn run(
        self,
        mut site: Site,
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
                let reason = self.hold.as_ref().and_then(|hold| hold.lost());
                drop(self);
                let lost = Error::lost(reason.unwrap_or(LostReason::NotHeld));
                return tell(&mut report, Err(lost));
            };
            let error = match answer.await {
                Ok(released) => return self.end(released, unknown, report),
                Err(error) => error,
            };
            unknown |= error.is_unknown();
            let nodes = &self.core.nodes;
            let there = nodes.follow(&error, &site);
            let again = there.is_some()
                || error.is_could_not_ask()
                || error.is_unknown() && self.claim.is_alone();
            // After a lease the server has ended the hold by itself.
            if !again || started.elapsed() >= self.claim.terms().lease {
                drop(self);
                return tell(&mut report, Err(error));
            }
            // Two nodes that have not yet heard of a move send us to each other.
            if tries > if there.is_some() { HOPS } else { 1 } {
                tell(&mut report, Err(error.misdirected()));
                sleep(backoff.next()).await;
            }
            tries = tries.saturating_add(1);
            site = there.unwrap_or_else(|| nodes.site(self.claim.target()));
            next = self.takes_nothing_else().then(|| site.send(self.command()));
        }
    }

    /// Tells what the server said.
    fn end(self, released: Released, unknown: bool, mut report: Option<Report>) {
        let outcome = self.outcome(released, unknown);
        // Before the caller is told, so that what it asks next finds the owner free.
        drop(self);
        tell(&mut report, outcome);
    }

    /// What an answered RELEASE means. "Not held" after a try whose reply was lost is that try's
    /// own doing, if the lease cannot have run out in between.
    fn outcome(&self, released: Released, unknown: bool) -> Result<(), Error> {
        let lost = self.hold.as_ref().and_then(|hold| hold.lost());
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
