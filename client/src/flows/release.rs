//! Giving a hold back, and seeing to it that the server knows.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep};

use crate::flows::{Context, Request, acquire};
use crate::ledger::{Grant, Hold, HoldOptions, Owner, UnnamedRelease, Usage};
use crate::topology::{MAX_REDIRECTS, Route};
use crate::wire::{Answer, Attachment, Command, Mode, Released, Then, WaitMode, request};
use crate::{Backoff, Error, LostReason, trace};

/// Where it is told how it went: after the second try at the latest, while the background goes on
/// trying.
pub(crate) type Report = Option<oneshot::Sender<Result<(), Error>>>;

/// Sends RELEASE at once and leaves the rest to the background. With a report it is told how that
/// went.
pub(crate) fn start(context: &Arc<Context>, usage: Usage, hold: Option<Arc<Hold>>, report: Report) {
    Release::new(context, usage, hold, report).begin();
}

/// Of several locks whose hold is lost, or may be: gives back those that are still held with these
/// tokens. The command for several names no token, and that for one does. How each of them went.
pub(crate) fn remains(
    context: &Arc<Context>,
    usage: &Usage,
    token: impl Fn(&[u8]) -> u64,
) -> Vec<Answer<()>> {
    parts(context, usage, None, token)
}

/// The same, of this hold, if it has an entry of each.
fn parts(
    context: &Arc<Context>,
    usage: &Usage,
    whole: Option<&Arc<Hold>>,
    token: impl Fn(&[u8]) -> u64,
) -> Vec<Answer<()>> {
    let target = &usage.target;
    if target.mode != Mode::Several {
        return Vec::new();
    }
    let part = |name: &Arc<[u8]>| part(context, usage, whole, name, token(name));
    target.names.iter().map(part).collect()
}

/// Gives one of several locks back.
fn part(
    context: &Arc<Context>,
    usage: &Usage,
    whole: Option<&Arc<Hold>>,
    name: &Arc<[u8]>,
    token: u64,
) -> Answer<()> {
    let one = usage.target.one(name).claim(usage.options);
    give_back_of(context, whole, one, token, Instant::now())
}

/// Gives back one lock of several that has another token than is known here: it was entered again,
/// and who had it has gone, or is not known yet. What the owner has there alone needs no token;
/// beside others, to be entered once more tells it: one newer than these several is another hold.
async fn untold_part(context: &Arc<Context>, whole: &Hold, usage: Usage) -> Result<(), Error> {
    let target = Arc::clone(&usage.target);
    if target.is_alone() {
        let (report, outcome) = Answer::open();
        start(context, usage, None, Some(report));
        return outcome.await;
    }
    let entered = acquire::start(Request {
        context: Arc::clone(context),
        target,
        options: whole.options,
        wait_mode: WaitMode::None,
        own: false,
        passing: true,
        kept: None,
        waited: None,
    });
    match entered.await {
        Ok(mut entered) if entered.hold.token <= whole.token => {
            let ours = give_back(context, usage, entered.hold.token, Instant::now());
            let both = join_all([ours, entered.release()]).await;
            both.into_iter().collect()
        }
        Err(error) if !error.is_not_acquired() => {
            // It goes with the last of those others.
            usage.may_be_left(Instant::now());
            Ok(())
        }
        _ => Err(Error::lost(LostReason::NotHeld)),
    }
}

/// Gives a grant back as if it had been held, and dropped; but nobody counts on it. How that went.
///
/// It was not granted before `since`, so that a lease after that it may be over: the owner may have
/// been granted something else by then, which a RELEASE without a token would take.
pub(super) fn give_back(
    context: &Arc<Context>,
    usage: Usage,
    token: u64,
    since: Instant,
) -> Answer<()> {
    give_back_of(context, None, usage, token, since)
}

/// The same, as one of the locks of this hold, which has an entry of each.
fn give_back_of(
    context: &Arc<Context>,
    whole: Option<&Arc<Hold>>,
    usage: Usage,
    token: u64,
    since: Instant,
) -> Answer<()> {
    let lease = usage.options.lease_from(since);
    let attachment = Attachment::new(None, since, Duration::ZERO);
    let hold = Hold::new(&usage, Grant::new(token, lease, attachment, false));
    // Otherwise an entry that is left may be another guard's.
    if !usage.may_have_been_released() {
        hold.keep_tokens(Instant::now());
    }
    let (report, outcome) = Answer::open();
    let release = Release::new(context, usage, Some(hold), Some(report));
    let whole = whole.cloned();
    Release { whole, ..release }.begin();
    outcome
}

/// Gives a grant back for which nobody listens. What it was for is not known: a lock of another
/// kind says so, and a read-write lock whether it is this owner who reads.
pub(super) async fn give_back_any(context: Arc<Context>, owner: Owner, key: Arc<[u8]>, token: u64) {
    let options = HoldOptions {
        lease: context.settings.lease,
        renewed: false,
        max_hold: None,
    };
    // How many permits it was granted the answer tells, when one of them is given back.
    let (permits, limit) = (1, None);
    let permit = Mode::Permits { permits, limit };
    for mode in [Mode::Plain, Mode::Read, Mode::Write, permit] {
        let target = owner.target(&context.ledger, mode, std::slice::from_ref(&key));
        match give_back(&context, target.claim(options), token, Instant::now()).await {
            Err(error) if error.has_code("WRONGKIND") => {}
            Err(error) if error.is_lost() && mode == Mode::Read => {}
            _ => return,
        }
    }
}

struct Release {
    context: Arc<Context>,
    /// If it names no token.
    unnamed: Option<UnnamedRelease>,
    /// Kept until the end: while it lives, no ACQUIRE of the same owner is taken for alone, and
    /// so none can be swept away by a RELEASE that is sent again.
    usage: Usage,
    hold: Option<Arc<Hold>>,
    /// That of several locks, with an entry of each, of which this gives one back.
    whole: Option<Arc<Hold>>,
    report: Report,
    span: trace::Span,
    began: Instant,
    tries: u32,
    backoff: Backoff,
    /// Whether an earlier try may have been carried out.
    unknown: bool,
}

impl Release {
    fn new(context: &Arc<Context>, usage: Usage, hold: Option<Arc<Hold>>, report: Report) -> Self {
        let target = &usage.target;
        Self {
            context: Arc::clone(context),
            span: trace::release(&**target, &target.owner, target.mode),
            unnamed: None,
            usage,
            hold,
            whole: None,
            report,
            began: Instant::now(),
            tries: 0,
            backoff: Backoff::new(),
            unknown: false,
        }
    }

    /// The first try. It is handed over here and not in a task, so that an ACQUIRE which the caller
    /// sends next comes after.
    fn begin(mut self) {
        let target = Arc::clone(&self.usage.target);
        let names_its_token = self.hold.is_some() && target.mode.has_token();
        let turn = target.turn();
        let may_be_sent = target.mode == Mode::Write || self.takes_nothing_else();
        // Counted before the look at what else there is: what is granted after that look is in
        // doubt.
        let unnamed = || (may_be_sent && !names_its_token).then(|| target.unnamed_release());
        let handing_over = unnamed();
        self.unnamed = unnamed();
        if !may_be_sent || !self.takes_nothing_else() {
            drop(turn);
            return self.lock_by_lock(handing_over);
        }
        let route = self.context.router.route(target.key());
        let unsent = self.hand_over(&route);
        drop(handing_over);
        drop(turn);
        drop(unsent);
    }

    /// A word that ends it is heard where it arrives; only what is left otherwise is a task. So the
    /// answers to two releases are heard in the order in which these were carried out: the other
    /// way round the entry that the first of them has left is taken for one of which nobody knows.
    fn hand_over(mut self, route: &Route) -> Option<Then> {
        self.tries = self.tries.saturating_add(1);
        let pending = self.context.background.pending.token();
        let (there, link) = (route.clone(), route.node.commands.link());
        route.send_then(self.command(), move |answer| {
            match answer {
                Ok(released) => {
                    self.is_answered_by(&there, link);
                    self.end(released);
                }
                Err(error) => self.go_on(there, error),
            }
            drop(pending);
        })
    }

    /// The command, with a lease for what is left of a reader's hold, which starts anew as by a
    /// renewal: servers of version 0.1 have a lease for each entry, and the others might end
    /// earlier than their guards count on.
    fn command(&self) -> Command<Released> {
        let target = &self.usage.target;
        let hold = self.hold.as_ref();
        let lease = hold.filter(|_| target.mode == Mode::Read).map(|hold| {
            let lease = hold.anew(Instant::now());
            let length = lease.lease.length;
            lease.keep();
            length
        });
        request::release(target.subject(), hold.map(|hold| hold.token), lease)
    }

    /// Whether it cannot take another hold than the one that it is meant for: the server tells by
    /// the token, there is no other, or a writer's has not been lost. Nobody is told here of a
    /// loss: whoever hears of it may drop a guard, and it is our turn.
    fn takes_nothing_else(&self) -> bool {
        let target = &self.usage.target;
        let is_last = |hold: &Arc<Hold>| !hold.is_over(Instant::now()) && !hold.is_overtaken();
        match target.mode {
            Mode::Plain | Mode::Read | Mode::Permits { .. } => {
                self.hold.is_some() || target.is_alone()
            }
            Mode::Write => target.is_alone() || self.hold.as_ref().is_some_and(is_last),
            // The server does not tell of several whether any of them is held still.
            Mode::Several => target.alone_at(Instant::now()).count() == target.names.len(),
        }
    }

    /// Of several locks each is given back by its token: beside other holds of the owner the
    /// command for all, which names none, would leave it open whether it has taken one of theirs.
    /// Nothing else is sent that may take another hold: it goes with the last of those.
    fn lock_by_lock(mut self, handing_over: Option<UnnamedRelease>) {
        for unnamed in self.unnamed.take().into_iter().chain(handing_over) {
            unnamed.was_not_sent();
        }
        let now = Instant::now();
        let Some(hold) = self.hold.clone() else {
            self.usage.may_be_left(now);
            return self.cannot_be_sent();
        };
        let context = Arc::clone(&self.context);
        let is_held = hold.lost(now).is_none();
        let whole = is_held.then_some(&hold).filter(|hold| hold.is_whole());
        let parts = parts(&context, &self.usage, whole, |name| hold.token_at(name));
        if parts.is_empty() || !is_held {
            return self.cannot_be_sent();
        }
        let report = self.report.take();
        // From now on a part may be all that the owner has there, and is tried again then.
        drop(self);
        context.background.spawn(async move {
            let outcome = join_all(parts).await.into_iter().collect();
            // Whoever dropped unlock() does not want to know.
            let _ = report.map(|report| report.send(outcome));
        });
    }

    /// Goes on with one of several locks that the server does not know by the token of these. The
    /// usage goes along: an ACQUIRE that was sent in between as the only one of its owner, with
    /// ONCE, would take over the very entry that is given back here, and its guard would lose it.
    fn go_on_untold(mut self, whole: Arc<Hold>) {
        let (context, report) = (Arc::clone(&self.context), self.report.take());
        let Self { usage, .. } = self;
        Arc::clone(&context).background.spawn(async move {
            let outcome = untold_part(&context, &whole, usage).await;
            let _ = report.map(|report| report.send(outcome));
        });
    }

    fn lost(&self) -> Option<LostReason> {
        self.hold.as_ref()?.lost(Instant::now())
    }

    /// If the first try was answered, what was handed over after it was carried out after it,
    /// unless that went by another connection, or to another node.
    fn is_answered_by(&mut self, route: &Route, link: u64) {
        let (router, key) = (&self.context.router, self.usage.target.key());
        if let Some(unnamed) = self.unnamed.as_mut().filter(|_| self.tries == 1) {
            unnamed.in_order =
                route.node.commands.link() == link && router.is_home(&route.node, key);
        }
    }

    fn go_on(self, route: Route, error: Error) {
        let (context, span) = (Arc::clone(&self.context), self.span.clone());
        let trying = async move { span.around(self.try_again(route, error)).await };
        context.background.spawn(trying);
    }

    async fn try_again(mut self, from: Route, error: Error) {
        let context = Arc::clone(&self.context);
        let router = &context.router;
        self.unknown |= error.is_unknown();
        let there = router.redirected(&error, &from);
        let again = there.is_some()
            || error.is_unavailable()
            || error.is_unknown() && self.usage.target.is_alone();
        // After a lease the server has ended the hold by itself.
        if !again || self.began.elapsed() >= self.usage.options.lease {
            self.leave();
            return self.tell(Err(error));
        }
        // Two nodes that have not yet heard of a move send us to each other.
        if self.tries > if there.is_some() { MAX_REDIRECTS } else { 1 } {
            let in_time = self.began.elapsed() < router.response_timeout;
            let patient = there.is_some() && in_time;
            let report = self.report.take_if(|_| !patient);
            let _ = report.map(|report| report.send(Err(error.misdirected())));
            sleep(self.backoff.next()).await;
        }
        let route = there.unwrap_or_else(|| router.route(self.usage.target.key()));
        let target = Arc::clone(&self.usage.target);
        let turn = target.turn();
        if !self.takes_nothing_else() {
            drop(turn);
            if self.unknown {
                self.leave();
                return self.tell(Err(Error::no_reply(None)));
            }
            return self.lock_by_lock(None);
        }
        let unsent = self.hand_over(&route);
        drop(turn);
        drop(unsent);
    }

    /// Nobody knows whether it was carried out, and it is not sent again beside other holds of the
    /// owner. What of several locks it has alone is given back by its tokens: a later wait would
    /// take what is left there for its own grant, and give that back together with what others
    /// have.
    fn leave(&self) {
        let target = &self.usage.target;
        let hold = self.hold.as_ref().filter(|_| self.unknown);
        let Some(hold) = hold else { return };
        if target.mode == Mode::Several {
            for name in target.alone_at(Instant::now()) {
                // It goes on by itself.
                drop(part(
                    &self.context,
                    &self.usage,
                    None,
                    name,
                    hold.token_at(name),
                ));
            }
        }
    }

    /// The server has no entry of it left. Other guards had one each: a failover has lost theirs,
    /// and they are told now, not at their next renewal.
    fn is_freed(&self) {
        let Some(hold) = &self.hold else { return };
        let target = &self.usage.target;
        for other in target.guarded() {
            if other.token_at(target.key()) == hold.token {
                other.lose(LostReason::NotHeld);
            }
        }
    }

    fn cannot_be_sent(self) {
        let reason = self.lost().unwrap_or(LostReason::NotHeld);
        self.tell(Err(Error::lost(reason)));
    }

    /// Tells what the server said. "Not held" after a try whose reply was lost is that try's own
    /// doing, if the lease cannot have run out in between.
    fn end(mut self, released: Released) {
        self.usage.target.released(released);
        let are_permits = matches!(self.usage.target.mode, Mode::Permits { .. });
        match released {
            Released::Freed => self.is_freed(),
            // It was not known how many permits it had.
            Released::Left(left) if are_permits => return self.give_back_rest(left),
            // Entered once more than anybody here knows, by a call whose answer was lost.
            Released::Left(_) if self.usage.target.is_alone() => return self.once_more(),
            _ => {}
        }
        if !matches!(released, Released::NotHeld) {
            return self.tell(Ok(()));
        }
        let outcome = match self.lost() {
            None if self.unknown => Ok(()),
            Some(_) if self.unknown => Err(Error::no_reply(None)),
            lost => {
                // The server knows it by its token: nor do the other guards of this hold have it.
                if let Some(hold) = self.hold.as_ref().filter(|_| self.unnamed.is_none()) {
                    hold.lose(LostReason::NotHeld);
                }
                if let Some(whole) = self.whole.take() {
                    return self.go_on_untold(whole);
                }
                Err(Error::lost(lost.unwrap_or(LostReason::NotHeld)))
            }
        };
        self.tell(outcome);
    }

    /// Gives back what permits of a grant are left.
    fn give_back_rest(mut self, left: u32) {
        let (ledger, target) = (&self.context.ledger, &self.usage.target);
        let (permits, limit) = (left, None);
        let rest = Mode::Permits { permits, limit };
        let rest = target.owner.target(ledger, rest, &target.names);
        self.usage = rest.claim(self.usage.options);
        self.once_more();
    }

    /// This one was carried out, whatever the next finds.
    fn once_more(mut self) {
        (self.unknown, self.tries) = (true, 0);
        self.begin();
    }

    fn tell(mut self, outcome: Result<(), Error>) {
        let report = self.report.take();
        if outcome.as_ref().is_err_and(Error::is_unknown) {
            self.usage.may_be_left(Instant::now());
        }
        // Before the caller is told, so that what it asks next finds the owner free.
        drop(self);
        // Whoever dropped unlock() does not want to know.
        let _ = report.map(|report| report.send(outcome));
    }
}
