//! One call of `lock()` or its siblings, from the first command on. It goes on apart from its
//! caller, so that the caller may be dropped at any moment.
//!
//! What most calls come to is the lock, at once: that is here. All else is the [state
//! machine](crate::flows::call).

use std::sync::{Arc, Weak};

use smallvec::SmallVec;
use tokio::sync::{OwnedMutexGuard, oneshot};
use tokio::time::Instant;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::flows::{Call, Context, Held, Kept, State, release};
use crate::ledger::{Grant, HoldOptions, Mailbox, Reserved, Target, Usage};
use crate::topology::AttachedRoute;
use crate::wire::{Acquired, Answer, Command, WaitMode, request};
use crate::{Error, metrics, trace};

/// What a caller asked for.
pub(crate) struct Request {
    pub(crate) context: Arc<Context>,
    pub(crate) target: Arc<Target>,
    pub(crate) options: HoldOptions,
    pub(crate) wait_mode: WaitMode,
    /// Whether the owner was minted for this call: until there is a guard nobody else can have it,
    /// nor stand in the queue for it.
    pub(crate) own: bool,
    /// Whether it is taken only to be given back: then no replica need know of it, and a client
    /// that shuts down takes it all the same.
    pub(crate) passing: bool,
    /// Where it is to be kept: who waits there hears that it is not to be had at once.
    pub(crate) kept: Option<Arc<Kept>>,
    /// The wait that it goes on with, of a caller in the line of a lock that is kept.
    pub(crate) waited: Option<Waited>,
}

/// A wait that began here, and goes on in the server.
#[derive(Clone, Copy)]
pub(crate) struct Waited {
    pub(crate) since: Instant,
    /// Whether it was for a hold of this process: then the server was there, and that it has gone
    /// since ends no wait.
    pub(crate) was_held_up: bool,
}

/// An ACQUIRE under way.
pub(super) struct Asked {
    pub(super) at: AttachedRoute,
    pub(super) lease: Reserved,
    pub(super) answer: Answer<Heard>,
}

/// What an ACQUIRE has come to, and what was known when the answer arrived. Looked up later, what
/// was given back behind the grant would be gone.
pub(super) struct Heard {
    pub(super) acquired: Acquired,
    /// How often its owner may hold the lock.
    pub(super) most: u64,
    /// See [`Target::counted`].
    pub(super) is_next: bool,
}

impl Heard {
    fn new(acquired: Acquired, target: &Target) -> Self {
        let mut heard = Self::first(acquired, target);
        if let Acquired::Granted { token, .. } = acquired {
            heard.most = target.most(token, Instant::now());
        }
        heard
    }

    /// Nothing was asked for before it.
    fn first(acquired: Acquired, target: &Target) -> Self {
        let is_next =
            matches!(acquired, Acquired::Granted { count, token } if target.counted(count, token));
        Self {
            acquired,
            most: u64::MAX,
            is_next,
        }
    }
}

impl Asked {
    /// Hands an ACQUIRE over, now.
    pub(super) fn send(
        request: &Request,
        usage: &Usage,
        permit: Option<&mut QueuePermit>,
        at: AttachedRoute,
    ) -> Self {
        let turn = usage.target.turn();
        let (lease, acquire) = acquire(request, usage, permit, &at);
        let (told, answer) = Answer::open();
        let target = Arc::clone(&usage.target);
        let unsent = at.route.send_then(acquire, move |answer| {
            // A call that no longer listens has its own way of undoing what it asked for.
            let _ = told.send(answer.map(|acquired| Heard::new(acquired, &target)));
        });
        drop(turn);
        // The answer says that there is no runtime.
        drop(unsent);
        Self { at, lease, answer }
    }
}

/// The ACQUIRE for a usage, with a place in the queue if it has the permit for it; with ONCE, and
/// so harmless to send again, if nothing else of its owner is at the lock.
fn acquire(
    request: &Request,
    usage: &Usage,
    permit: Option<&mut QueuePermit>,
    at: &AttachedRoute,
) -> (Reserved, Command<Acquired>) {
    let (subject, session) = (usage.target.subject(), &at.route.node.session);
    let now = Instant::now();
    let lease = usage.lease(now);
    let wait_mode = permit.map_or(WaitMode::None, |permit| {
        permit.mailbox.asks(session, lease.number);
        request.wait_mode
    });
    let name = &session.name;
    let acquire = request::acquire(subject, lease.lease, wait_mode, name, lease.is_alone);
    // Asked for behind the grant, a caller who is refused in between would not be told of.
    let acquire = acquire.wanted(request.kept.is_some());
    (lease, acquire.only_for(at.attachment.server()))
}

/// Where the caller listens. What is held and cannot be delivered is dropped, and so given back.
pub(super) type Reply = oneshot::Sender<Result<Held, Error>>;

pub(super) type Permits = SmallVec<[OwnedMutexGuard<()>; 1]>;

/// The right to wait in the queue for this owner, and what is heard there.
pub(super) struct QueuePermit {
    pub(super) mailbox: Mailbox,
    pub(super) span: trace::Span,
    since: Option<Instant>,
    /// It may go on without its client.
    context: Weak<Context>,
    options: HoldOptions,
    _permits: Permits,
}

impl QueuePermit {
    pub(super) fn new(request: &Request, usage: &Usage, permits: Permits) -> Self {
        let target = &usage.target;
        Self {
            mailbox: Mailbox::new(target),
            span: trace::wait(target, &target.owner, target.mode),
            since: Some(
                request
                    .waited
                    .map_or_else(Instant::now, |waited| waited.since),
            ),
            context: Arc::downgrade(&request.context),
            options: usage.options,
            _permits: permits,
        }
    }

    /// The caller waits no more, or has the lock.
    pub(super) fn ends(&mut self) {
        if let Some(since) = self.since.take() {
            self.span.waited(since);
            metrics::waited(since);
        }
    }
}

impl Drop for QueuePermit {
    /// What was not heard is given back, before another wait of the owner begins.
    fn drop(&mut self) {
        self.ends();
        for (token, since) in self.mailbox.close() {
            if let Some(context) = self.context.upgrade() {
                let usage = self.mailbox.target.claim(self.options);
                // It goes on by itself.
                drop(release::give_back(&context, usage, token, since));
            }
        }
    }
}

/// Sends the first ACQUIRE at once and leaves the rest to the background.
pub(crate) fn start(request: Request) -> Answer<Held> {
    let context = Arc::clone(&request.context);
    let is_ours = request.target.owner.is_of(&context.settings.id);
    // Two clients that share an owner would each think that it is alone.
    let foreign = || (!is_ours).then(|| Error::refused("the owner belongs to another client"));
    let shut_down = context.background.closing.is_cancelled() && !request.passing;
    let shut_down = shut_down.then(Error::shut_down);
    // It would be entered beside the guard that has it then.
    let kept = || {
        let is_kept = request.target.owner.is_kept() && request.kept.is_none();
        is_kept.then(|| Error::refused("the owner is that of a kept lock, which others use next"))
    };
    if let Some(refusal) = shut_down.or_else(foreign).or_else(kept) {
        return Answer::told(Err(refusal));
    }
    // An owner who waits in the queue already asks without joining it a second time.
    let permits: Option<Permits> = match request.wait_mode {
        WaitMode::None => None,
        _ if request.own => Some(Permits::new()),
        WaitMode::Until(_) | WaitMode::Forever => {
            let permits = request.target.permits().into_iter();
            permits.map(|permit| permit.try_lock_owned().ok()).collect()
        }
    };
    let (reply, answer) = Answer::open();
    let usage = request.target.claim(request.options);
    let attempt = Attempt {
        permit: permits.map(|permits| QueuePermit::new(&request, &usage, permits)),
        usage,
        reply,
        pending: context.background.pending.token(),
        request,
    };
    // Handed over here and not in a task: calls join the queue in the order in which they were
    // made.
    match context.router.attached(attempt.request.target.key()) {
        None => attempt.go_on(State::Ask(None)),
        Some(at) => attempt.ask(at),
    }
    answer
}

/// A call whose first answer has not come yet.
struct Attempt {
    request: Request,
    usage: Usage,
    permit: Option<QueuePermit>,
    reply: Reply,
    pending: TaskTrackerToken,
}

impl Attempt {
    /// Sends the first ACQUIRE. What most calls come to is the lock, and that is heard where the
    /// answer arrives; a task is for those that come to something else. Only who may not wait for
    /// longer than a time, or not at all, has one from the beginning, to watch that time while the
    /// connection is being made.
    fn ask(mut self, at: AttachedRoute) {
        if let WaitMode::Until(_) | WaitMode::None = self.request.wait_mode {
            let asked = Asked::send(&self.request, &self.usage, self.permit.as_mut(), at);
            return self.go_on(State::Asked(asked));
        }
        let (route, target) = (at.route.clone(), Arc::clone(&self.usage.target));
        let turn = target.turn();
        let (lease, acquire) = acquire(&self.request, &self.usage, self.permit.as_mut(), &at);
        let unsent = route.send_then(acquire, move |answer| self.answered(at, lease, answer));
        drop(turn);
        // It gives back what it may have been granted.
        drop(unsent);
    }

    /// Brings the caller a grant on which it can count as it is. What nobody takes is dropped, and
    /// so given back.
    fn answered(mut self, at: AttachedRoute, lease: Reserved, answer: Result<Acquired, Error>) {
        let answer = answer.map(|acquired| Heard::first(acquired, &self.usage.target));
        if let Ok(heard) = &answer
            && let Acquired::Granted { token, count } = heard.acquired
            && at.route.node.acknowledger.is_none()
            && at.is_fresh(lease.counted())
            && (heard.is_next || !self.usage.may_have_been_released())
        {
            let grant = Grant::new(token, lease.keep(), at.attachment, count == 1);
            self.usage.is_next = heard.is_next;
            let held = Held::new(&self.request.context, self.usage, grant);
            // While the hold is known here, so that the same grant told twice is not taken for
            // another.
            drop(self.permit);
            if let Some(kept) = &self.request.kept {
                kept.is_granted(&held.hold);
            }
            let _ = self.reply.send(Ok(held));
            return;
        }
        let answer = Answer::told(answer);
        self.go_on(State::Asked(Asked { at, lease, answer }));
    }

    fn go_on(self, state: State) {
        let context = Arc::clone(&self.request.context);
        let call = Call::new(self.request, self.usage, self.permit, &state);
        context.background.spawn(call.run(state, self.reply));
        drop(self.pending);
    }
}
