//! One task of a client process: takes locks as its plan says, and looks at the results.

use std::cell::Cell;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use rlock_client::{Client, Error, Owner, QuorumClient, QuorumError};
use tokio::time::{Instant, sleep, timeout};

use crate::hands::{self, Ahead, Before, Begun};
use crate::judge::{AnyGuard, Held, Judge, name};
use crate::listens::Listens;
use crate::permits::Asked;
use crate::schedule::{self, End, Mode, Step, Verb};
use crate::stops::{Calling, Stop, StopKind};

/// The client with which a process takes locks.
#[derive(Clone)]
pub(crate) enum AnyClient {
    One(Client),
    Quorum(QuorumClient),
}

impl AnyClient {
    pub(crate) async fn shutdown(&self) {
        match self {
            Self::One(client) => client.shutdown().await,
            Self::Quorum(client) => client.shutdown().await,
        }
    }
}

/// Why a call has not brought a guard, or why one does not hear any more that it is wanted.
pub(crate) struct Refusal {
    pub(crate) kind: &'static str,
    pub(crate) text: String,
}

impl From<Error> for Refusal {
    fn from(error: Error) -> Self {
        let kind = kind_of(&error);
        let text = error.to_string();
        Self { kind, text }
    }
}

impl From<QuorumError> for Refusal {
    fn from(error: QuorumError) -> Self {
        let kind = if error.is_not_acquired() {
            "not acquired by a majority"
        } else if error.is_lost() {
            "lost"
        } else {
            "no majority"
        };
        let text = error.to_string();
        Self { kind, text }
    }
}

/// A task, with all that it needs.
#[derive(Clone)]
pub(crate) struct Task {
    pub(crate) number: usize,
    pub(crate) process: usize,
    pub(crate) client: AnyClient,
    pub(crate) setup: schedule::Client,
    /// None if each call is an owner of its own.
    pub(crate) owner: Option<Owner>,
    /// Whether each call is an owner of its own.
    pub(crate) is_own: bool,
    pub(crate) judge: Rc<Judge>,
    /// Longest that a message is under way.
    pub(crate) latency: Duration,
    /// Carries out a stop in the midst of a call.
    pub(crate) stops: Rc<dyn Fn(StopKind)>,
    /// A call is about to be polled: whether it is dropped in place of that.
    pub(crate) polls: Rc<dyn Fn() -> bool>,
}

impl Task {
    /// Steps may have steps inside.
    pub(crate) fn run<'a>(&'a self, steps: &'a [Step]) -> Pin<Box<dyn Future<Output = ()> + 'a>> {
        Box::pin(async move {
            let mut begun = Vec::new();
            for (place, step) in steps.iter().enumerate() {
                if begun.is_empty() {
                    begun.push(self.begin(step));
                }
                hands::all_end(&mut begun).await;
                let held = begun.remove(0).held();
                let mut rest = steps.iter().skip(place + 1 + begun.len()).peekable();
                let mut ahead =
                    |of| rest.next_if(|step| step.ahead.is_some_and(|of_it| of_it.of == of));
                if let Some(held) = &held {
                    self.use_it(step, held).await;
                }
                if begun.is_empty()
                    && let Some(next) = ahead(Before::Guard)
                {
                    begun.push(self.begin_ahead(next).await);
                }
                if let Some(held) = &held {
                    self.give_back(step, held).await;
                }
                let owner = self.owner_name(step);
                self.judge.asks_no_more(&owner, &step.locks);
                if !begun.is_empty()
                    && let Some(next) = ahead(Before::Call)
                {
                    begun.push(self.begin_ahead(next).await);
                }
            }
        })
    }

    /// The owner of a step's call; none if the call is an owner of its own.
    fn owner(&self, step: &Step) -> Option<&Owner> {
        let owner = self.owner.as_ref();
        owner.filter(|_| !step.has_own_owner())
    }

    fn is_own(&self, step: &Step) -> bool {
        self.is_own || step.has_own_owner()
    }

    fn owner_name(&self, step: &Step) -> String {
        let owner = self.owner(step).map(ToString::to_string);
        owner.unwrap_or_default()
    }

    /// A call, which nobody has polled yet.
    fn begin<'a>(&'a self, step: &'a Step) -> Begun<'a> {
        Begun::of(|unwatched| {
            Box::pin(async move {
                if self.owner(step).is_some() {
                    self.judge.asks(&self.owner_name(step), &step.locks);
                }
                self.take(step, &unwatched).await
            })
        })
    }

    async fn begin_ahead<'a>(&'a self, step: &'a Step) -> Begun<'a> {
        let mut begun = self.begin(step);
        if let Some(Ahead { polls, every, .. }) = step.ahead {
            self.judge.count("asked ahead");
            begun.look().await;
            for _ in 1..polls {
                sleep(every).await;
                begun.look().await;
            }
        }
        begun
    }

    async fn take(&self, step: &Step, unwatched: &Cell<Duration>) -> Option<Rc<Held>> {
        let (number, locks) = (self.number, &step.locks);
        let (mode, verb) = (step.mode, step.verb);
        let tokens = self.judge.tokens_before(locks);
        let (judge, started) = (&self.judge, Instant::now());
        let stood = judge.stood(self.process);
        judge.note(format_args!("task {number}: {verb:?} {mode:?} {locks:?}"));
        let owner = self.owner_name(step);
        let under_way = judge.surplus.begins(&owner, locks);
        let _works = judge.entries.works(&owner);
        let is_own = self.is_own(step);
        let is_in_order = matches!(mode, Mode::Plain | Mode::Permits) && is_own;
        // Calls that would keep it wait apart from others of their process.
        let waits = is_in_order && matches!(verb, Verb::Lock) && step.kept.is_none();
        let waits_to_keep = step.kept.filter(|_| matches!(verb, Verb::Lock));
        let asked = locks.first().copied().zip(step.asked);
        let waiting = asked.map(|(lock, asked)| judge.limits.waits(lock, asked));
        let place = judge.asked((self.process, locks), waits);
        let terms = waits_to_keep.map(|idle| (self.process, locks.clone(), idle, step.lease));
        let kept_place = terms.map(|terms| judge.asked_to_keep(terms));
        let asking = judge.listening.asks(step, self.process, is_own);
        let call = Box::pin(self.call(step));
        let call = until_woken(step.drop_when_woken, call);
        let call = self.in_call(step, Calling::Taking, call);
        let call = async { call.await.flatten() };
        let result = match step.drop_after {
            Some(after) => timeout(after, call).await.ok().flatten(),
            None => call.await,
        };
        drop((under_way, waiting));
        let Some(result) = result else {
            judge.note(format_args!("task {number}: dropped the call"));
            judge.count("call dropped");
            // It may have been granted all the same: then it is as if its guard had been dropped.
            let asked = step.lease.unwrap_or(self.setup.lease);
            judge.surplus.granted(&owner, asked, step.lease.is_none());
            return None;
        };
        let stood = judge.stood(self.process).saturating_sub(stood);
        let waited = started.elapsed().saturating_sub(stood);
        self.in_time(step, waited.saturating_sub(unwatched.get()));
        match result {
            Ok(guard) => {
                let (owner, token) = (guard.owner(), guard.token());
                judge.note(format_args!(
                    "task {number}: has {locks:?} as {owner}, {token}"
                ));
                judge.count("guard");
                judge.count_all("guard of permits", mode.is_permits().into());
                judge.granted((self.process, locks), place, token);
                judge.granted_to_keep(kept_place);
                judge.listening.is_granted(&asking, &owner);
                let has_grace = !self.setup.grace.is_zero();
                let by = (self.process, has_grace);
                // An owner that was made for this call has a name from now on.
                drop(judge.entries.works(&owner));
                let limit = asked.map(|(lock, of)| judge.limits.most(lock, of, started));
                let limit = limit.unwrap_or_default();
                let held = judge.taken(guard, mode, locks, tokens, by, limit);
                self.has_lease(step, &held, unwatched.get());
                Some(held)
            }
            Err(error) => {
                if ["not acquired", "not acquired by a majority"].contains(&error.kind) {
                    judge.listening.is_refused(&asking);
                }
                self.is_refused(step, started, &error);
                None
            }
        }
    }

    /// How long a guard lasts in any case, and what renews it. Its call was not watched for the
    /// time `unwatched`.
    fn has_lease(&self, step: &Step, held: &Held, unwatched: Duration) {
        let is_own = self.is_own(step);
        // At a majority no call asks for a lease of its own.
        let is_renewed = step.lease.is_none() || matches!(self.client, AnyClient::Quorum(_));
        let lease = is_renewed.then_some(self.setup.lease);
        held.lease.set(lease.filter(|_| is_own));
        let shared = (!is_own).then_some(self.setup.lease);
        held.shared_lease.set(shared);
        let asked = if is_renewed { None } else { step.lease };
        let asked = asked.unwrap_or(self.setup.lease);
        if let Some(idle) = step.kept {
            self.judge.is_kept(held, idle);
        }
        // A kept lock is handed on while half of its lease is left.
        let sure = match step.kept {
            Some(_) => asked / 2,
            None => asked,
        };
        let (name, lasts) = (&held.owner, self.lasts(sure, is_renewed));
        let lasts = lasts.saturating_sub(unwatched);
        let surplus = &self.judge.surplus;
        surplus.granted(name, asked, is_renewed);
        held.lasts.set(surplus.shortest(name, &step.locks, lasts));
    }

    /// A call has not brought a guard.
    fn is_refused(&self, step: &Step, since: Instant, error: &Refusal) {
        let (judge, number) = (&self.judge, self.number);
        judge.note(format_args!("task {number}: {}", error.text));
        judge.count(error.kind);
        if ["unknown", "unavailable", "lost"].contains(&error.kind) {
            judge.entries.is_unsure();
        }
        if !["not acquired", "not acquired by a majority", "deadlock"].contains(&error.kind)
            && (error.kind != "refused" || self.is_own(step) && !self.may_be_refused(step, since))
        {
            judge.must_not_fail(number, &error.text);
        }
    }

    /// Whether there may have been no limit since then, or one that is too low.
    fn may_be_refused(&self, step: &Step, since: Instant) -> bool {
        let asked = step.locks.first().zip(step.asked);
        asked.is_some_and(|(lock, asked)| {
            self.judge.limits.least(*lock, asked, since) < asked.permits
        })
    }

    /// A call, in whose midst something may happen. None if it was dropped.
    async fn in_call<T>(
        &self,
        step: &Step,
        of: Calling,
        call: impl Future<Output = T>,
    ) -> Option<T> {
        let planned = step.stop.filter(|stop| stop.of == of);
        let done = |kind| {
            let number = self.number;
            self.judge
                .note(format_args!("task {number}: {of:?}, {kind:?}"));
            (self.stops)(kind);
        };
        let call = self.until_dropped(call);
        Stop::within(planned, call, done).await.flatten()
    }

    /// A call, unless it is dropped at one of its polls.
    async fn until_dropped<T>(&self, call: impl Future<Output = T>) -> Option<T> {
        let mut call = Box::pin(call);
        poll_fn(move |cx| {
            if (self.polls)() {
                self.judge.count("dropped at a poll");
                return Poll::Ready(None);
            }
            call.as_mut().poll(cx).map(Some)
        })
        .await
    }

    /// For so long a guard with this lease lasts in any case: word of the grant was under way for
    /// a while, and clients count on a little less.
    fn lasts(&self, lease: Duration, is_renewed: bool) -> Duration {
        let lasts = if is_renewed { Duration::MAX } else { lease };
        let slack = self.latency.saturating_mul(8).saturating_add(HEARD_LATE);
        lasts.saturating_sub(slack.saturating_add(lease / 10))
    }

    async fn call(&self, step: &Step) -> Result<AnyGuard, Refusal> {
        let first = step.locks.first().copied().unwrap_or_default();
        let client = match &self.client {
            AnyClient::One(client) => client,
            AnyClient::Quorum(client) => return self.call_quorum(client, step, first).await,
        };
        let owner = self.owner.clone().unwrap_or_else(|| client.owner());
        macro_rules! taken {
            ($lock:expr, $kind:path, $lock_verb:ident, $try_verb:ident, $within:ident) => {{
                let mut lock = $lock.owner(&owner);
                if let Some(lease) = step.lease {
                    lock = lock.lease(lease);
                }
                let guard = match step.verb {
                    Verb::Lock => lock.$lock_verb().await,
                    Verb::Try => lock.$try_verb().await,
                    Verb::Within(time) => lock.$within(time).await,
                };
                Ok(guard.map($kind)?)
            }};
        }
        if let Some(idle) = step.kept {
            return self.call_for_kept(client, step, first, idle).await;
        }
        match step.mode {
            Mode::Plain => {
                taken!(
                    client.lock(name(first)),
                    AnyGuard::Plain,
                    lock,
                    try_lock,
                    lock_timeout
                )
            }
            Mode::Read => taken!(
                client.rw_lock(name(first)),
                AnyGuard::Read,
                read,
                try_read,
                read_timeout
            ),
            Mode::Write => taken!(
                client.rw_lock(name(first)),
                AnyGuard::Write,
                write,
                try_write,
                write_timeout
            ),
            Mode::Permits => self.call_for_permits(client, step, first).await,
            Mode::Several => {
                let names = step.locks.iter().map(|lock| name(*lock));
                taken!(
                    client.multi(names),
                    AnyGuard::Several,
                    lock,
                    try_lock,
                    lock_timeout
                )
            }
        }
    }

    async fn call_for_kept(
        &self,
        client: &Client,
        step: &Step,
        lock: u8,
        idle: Duration,
    ) -> Result<AnyGuard, Refusal> {
        let mut lock = client.lock(name(lock)).keep(idle);
        if let Some(lease) = step.lease {
            lock = lock.lease(lease);
        }
        let guard = match step.verb {
            Verb::Lock => lock.lock().await,
            Verb::Try => lock.try_lock().await,
            Verb::Within(time) => lock.lock_timeout(time).await,
        };
        Ok(AnyGuard::Plain(guard?))
    }

    async fn call_for_permits(
        &self,
        client: &Client,
        step: &Step,
        lock: u8,
    ) -> Result<AnyGuard, Refusal> {
        let none = Asked {
            permits: 1,
            limit: None,
        };
        let Asked { permits, limit } = step.asked.unwrap_or(none);
        let mut semaphore = client.semaphore(name(lock), limit);
        if let Some(lease) = step.lease {
            semaphore = semaphore.lease(lease);
        }
        let guard = match step.verb {
            Verb::Lock => semaphore.acquire_many(permits).await,
            Verb::Try => semaphore.try_acquire_many(permits).await,
            Verb::Within(time) => semaphore.acquire_many_timeout(permits, time).await,
        };
        Ok(AnyGuard::Permits(guard?))
    }

    async fn call_quorum(
        &self,
        client: &QuorumClient,
        step: &Step,
        lock: u8,
    ) -> Result<AnyGuard, Refusal> {
        let lock = client.lock(name(lock));
        let guard = match step.verb {
            Verb::Lock => lock.lock().await,
            Verb::Try => lock.try_lock().await,
            Verb::Within(time) => lock.lock_timeout(time).await,
        };
        Ok(AnyGuard::Quorum(guard?, self.judge.new_name()))
    }

    /// A call ends in the time that its documentation says.
    fn in_time(&self, step: &Step, took: Duration) {
        let verb = step.verb;
        let reply = self.setup.response_timeout;
        // The time of messages in flight, and how far timers are off.
        let mut slack = self.latency.saturating_mul(8).saturating_add(SLACK);
        if let Some(within) = self.setup.acknowledged {
            // Calls of one owner for one lock are acknowledged in turn.
            if !self.is_own(step) {
                return;
            }
            // While one acknowledgement is waited for, the next waits; and the connection for it
            // may have to be opened, at a server that must be found.
            let one = within.saturating_add(reply);
            slack = slack.saturating_add(one.saturating_mul(2));
            slack = slack.saturating_add(reply.saturating_mul(3));
        }
        let longest = match verb {
            Verb::Lock => return,
            Verb::Try => reply.saturating_mul(TRY_TIMEOUTS),
            Verb::Within(time) => time.saturating_add(reply),
        };
        if took > longest.saturating_add(slack) {
            let number = self.number;
            self.judge.violation(format_args!(
                "task {number}: {verb:?} took {took:?}, replies may take {reply:?}"
            ));
        }
    }

    async fn use_it(&self, step: &Step, held: &Rc<Held>) {
        let half = step.hold.checked_div(2).unwrap_or_default();
        sleep(half).await;
        self.judge.look();
        if step.renews
            && let Some(guard) = self.judge.given_back(held)
        {
            let _works = self.judge.entries.works(&held.owner);
            self.judge.renews(&held.locks);
            let result = self.in_call(step, Calling::Renewing, guard.renew());
            let number = self.number;
            match result.await {
                None => {}
                Some(Ok(())) => self.judge.count("renewed"),
                Some(Err(error)) => {
                    self.judge
                        .note(format_args!("task {number}: renewing, {error}"));
                    self.judge.count("not renewed");
                    if self.judge.is_renewed(held) {
                        self.judge.must_not_fail(number, &error);
                    }
                }
            }
            self.judge.again(held, guard);
        }
        if step.downgrades
            && let Some(AnyGuard::Write(guard)) = self.judge.given_back(held)
        {
            let _works = self.judge.entries.works(&held.owner);
            let number = self.number;
            let result = self.in_call(step, Calling::Downgrading, guard.downgrade());
            match result.await {
                None => return,
                Some(Ok(guard)) => {
                    self.judge.note(format_args!("task {number}: reads only"));
                    self.judge.count("downgraded");
                    self.judge.again(held, AnyGuard::Read(guard));
                }
                Some(Err(error)) => {
                    self.judge
                        .note(format_args!("task {number}: to read only, {error}"));
                    self.judge.count("not downgraded");
                    return;
                }
            }
        }
        for _ in 0..step.calls {
            self.run_under_it(held).await;
        }
        if !step.inside.is_empty() {
            self.run(&step.inside).await;
        }
        if let Some(listens) = step.listens {
            self.listen(step, listens, held).await;
        }
        sleep(half).await;
        self.judge.look();
    }

    /// Has a command run under a lock.
    #[expect(
        clippy::await_holding_refcell_ref,
        reason = "nobody else takes the guard away, and it is to be looked at meanwhile"
    )]
    async fn run_under_it(&self, held: &Held) {
        let (judge, number, text) = (&self.judge, self.number, self.judge.new_name());
        let guard = held.guard.borrow();
        let Some(guard) = guard.as_ref() else { return };
        match self.until_dropped(guard.echo(&text)).await.flatten() {
            None => {}
            Some(Ok(answer)) => {
                judge.count("run under a lock");
                judge.was_run(&answer);
            }
            Some(Err(error)) => {
                judge.note(format_args!("task {number}: under it, {error}"));
                judge.count("not run under a lock");
                if judge.is_renewed(held) {
                    judge.must_not_fail(number, &error.to_string());
                }
            }
        }
    }

    /// Holds it for as long as nobody wants it, or as planned.
    async fn listen(&self, step: &Step, listens: Listens, held: &Rc<Held>) {
        let (judge, number) = (&self.judge, self.number);
        let mode = held.guard.borrow().as_ref().map(AnyGuard::mode);
        let Some(mode) = mode else { return };
        let is_own = self.is_own(step);
        let hearing = judge
            .listening
            .listens(held, (mode, is_own), listens, &self.setup);
        let (end, mut left) = (Instant::now() + listens.longest, listens.ignores);
        let mut planned = step.stop.filter(|stop| stop.of == Calling::Listening);
        judge.asks_to_be_told(&step.locks);
        while Instant::now() < end && !judge.listening.is_idle() {
            let call = self.until_wanted(listens, held, end);
            let dropped = |_| judge.count("dropped at a poll");
            let call = self.until_dropped(call);
            match Stop::within(planned.take(), call, dropped).await.flatten() {
                None => judge.listening.again(&hearing),
                Some(None) => {}
                Some(Some(Ok(()))) => {
                    judge.note(format_args!("task {number}: {:?} is wanted", step.locks));
                    judge.count("wanted");
                    judge.asks_to_be_told(&step.locks);
                    if let Some(wrong) = judge.listening.is_told(&hearing) {
                        judge.violation(format_args!("{wrong}"));
                    }
                    if left == 0 {
                        return;
                    }
                    left -= 1;
                }
                Some(Some(Err(error))) => {
                    judge.note(format_args!("task {number}: listening, {}", error.text));
                    judge.count("not heard");
                    if error.kind != "lost" || judge.is_renewed(held) {
                        judge.must_not_fail(number, &error.text);
                    }
                    return;
                }
            }
        }
    }

    /// None if nobody has wanted it so far.
    #[expect(
        clippy::await_holding_refcell_ref,
        reason = "nobody else takes the guard away, and it is to be looked at meanwhile"
    )]
    async fn until_wanted(
        &self,
        listens: Listens,
        held: &Held,
        end: Instant,
    ) -> Option<Result<(), Refusal>> {
        let guard = held.guard.borrow();
        let guard = guard.as_ref()?;
        if let Some(every) = listens.every {
            let told = timeout(Duration::ZERO, guard.wanted()).await.ok();
            if told.is_none() {
                sleep(every).await;
            }
            return told;
        }
        // One call for the whole time, so that no later call repeats its request.
        let mut wanted = pin!(guard.wanted());
        while Instant::now() < end && !self.judge.listening.is_idle() {
            tokio::select! {
                biased;
                told = &mut wanted => return Some(told),
                () = sleep(IDLE_EVERY) => {}
            }
        }
        None
    }

    async fn give_back(&self, step: &Step, held: &Rc<Held>) {
        let Some(guard) = self.judge.given_back(held) else {
            return;
        };
        let _works = self.judge.entries.works(&held.owner);
        let (number, locks, end) = (self.number, &step.locks, step.end);
        self.judge.must_be_held(held, &guard);
        let lost = if guard.is_lost() { ", lost" } else { "" };
        self.judge
            .note(format_args!("task {number}: {end:?} {locks:?}{lost}"));
        match end {
            End::Drop => drop(guard),
            End::UnlockUnheard => {
                let _ = timeout(Duration::ZERO, guard.unlock()).await;
            }
            End::Unlock => match self.in_call(step, Calling::Unlocking, guard.unlock()).await {
                None => {}
                Some(Ok(())) => self.judge.count("unlocked"),
                Some(Err(error)) => {
                    self.judge
                        .note(format_args!("task {number}: unlocking, {error}"));
                    self.judge.count("not unlocked");
                    if self.judge.is_renewed(held) {
                        self.judge.must_not_fail(number, &error);
                    }
                }
            },
        }
    }
}

/// Polls a call only this often, and then drops it: even when its result is there and it has not
/// seen it.
async fn until_woken<T>(times: Option<u8>, call: impl Future<Output = T>) -> Option<T> {
    let mut call = Box::pin(call);
    let mut left = times;
    poll_fn(move |cx| {
        if left == Some(0) {
            return Poll::Ready(None);
        }
        left = left.map(|left| left.saturating_sub(1));
        call.as_mut().poll(cx).map(Some)
    })
    .await
}

fn kind_of(error: &Error) -> &'static str {
    if error.is_not_acquired() {
        "not acquired"
    } else if error.is_lost() {
        "lost"
    } else if error.is_unavailable() {
        "unavailable"
    } else if error.is_unknown() {
        "unknown"
    } else if error.is_deadlock() {
        "deadlock"
    } else {
        "refused"
    }
}

/// The time between two looks of a task that listens whether others do something else.
const IDLE_EVERY: Duration = Duration::from_secs(1);

/// `try_lock()` may take this many times the time for a reply, at most.
const TRY_TIMEOUTS: u32 = 4;

const SLACK: Duration = Duration::from_millis(250);

/// A grant may be counted from the call of EVENTS before the one that told of it.
const HEARD_LATE: Duration = Duration::from_millis(450);
