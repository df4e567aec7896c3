//! One call of `lock()`, from the first command to the guard. It goes on apart from its caller, so
//! that the caller may be dropped at any moment.

use std::sync::Arc;
use std::time::Duration;

use smallvec::SmallVec;
use tokio::sync::{Mutex, OwnedMutexGuard, oneshot};
use tokio::time::{Instant, sleep_until};

use crate::background::Counted;
use crate::error::Error;
use crate::flows::renew::{self, Aim};
use crate::flows::{Context, Held, release, wait};
use crate::ledger::{Grant, HoldOptions, Mailbox, Reserved, Target, Usage};
use crate::topology::{AttachedRoute, Redirects};
use crate::trace;
use crate::wire::commands::Answer;
use crate::wire::reply::Acquired;
use crate::wire::request::{self, Command, Queue};

/// How long a caller waits for a lock that is taken.
#[derive(Clone, Copy, Debug)]
pub(crate) enum WaitMode {
    None,
    Until(Instant),
    Forever,
}

impl WaitMode {
    /// For at most this long; not at all for a time of zero.
    pub(crate) fn of(timeout: Duration) -> Self {
        match Instant::now().checked_add(timeout) {
            _ if timeout.is_zero() => Self::None,
            Some(deadline) => Self::Until(deadline),
            None => Self::Forever,
        }
    }
}

/// What a caller asked for.
pub(crate) struct Request {
    pub(crate) context: Arc<Context>,
    pub(crate) target: Arc<Target>,
    pub(crate) options: HoldOptions,
    pub(crate) wait_mode: WaitMode,
    /// Whether the owner was minted for this call: until there is a guard nobody else can have it.
    pub(crate) own: bool,
}

impl Request {
    /// Gives back what the server may have granted without our knowing.
    ///
    /// No token is known, so this would take any hold of the owner. So it is not done where the
    /// owner has others: what is left over ends with its lease, or when that owner comes again.
    pub(crate) fn give_up(&self, usage: Usage, error: &Error) {
        if error.is_unknown() {
            release::in_background(&self.context, usage, None);
        }
    }

    /// The ACQUIRE for a usage, handed over now; with ONCE, and so harmless to send again, if
    /// nothing else of its owner is at the lock.
    pub(crate) fn ask(usage: &Usage, queue: Queue, at: AttachedRoute) -> Asked {
        let (lease, acquire) = Self::acquire(usage, queue, &at);
        let answer = at.route.send(acquire);
        Asked { at, lease, answer }
    }

    fn acquire(usage: &Usage, queue: Queue, at: &AttachedRoute) -> (Reserved, Command<Acquired>) {
        let (target, session) = (usage.target(), &at.route.node.session.name);
        let lease = usage.lease(Instant::now());
        let (subject, once) = (target.subject(), lease.is_alone);
        let acquire = request::acquire(subject, lease.lease.length, queue, session, once);
        (lease, acquire.only_for(at.attachment.server()))
    }

    /// How long to wait in the queue.
    pub(crate) fn queue(&self) -> Queue {
        match self.wait_mode {
            WaitMode::None => Queue::No,
            WaitMode::Forever => Queue::Forever,
            WaitMode::Until(deadline) => {
                Queue::For(deadline.saturating_duration_since(Instant::now()))
            }
        }
    }
}

/// An ACQUIRE under way.
pub(crate) struct Asked {
    pub(crate) at: AttachedRoute,
    pub(crate) lease: Reserved,
    pub(crate) answer: Answer<Acquired>,
}

/// Where the caller listens. What is held and cannot be delivered is dropped, and so given back.
pub(crate) type Reply = oneshot::Sender<Result<Held, Error>>;

/// The right to wait in the queue for this owner, and what is heard there.
pub(crate) struct QueuePermit {
    pub(crate) mailbox: Mailbox,
    pub(crate) span: trace::Span,
    _permits: SmallVec<[OwnedMutexGuard<()>; 1]>,
}

impl QueuePermit {
    pub(crate) fn new(
        context: &Arc<Context>,
        usage: &Usage,
        permits: SmallVec<[OwnedMutexGuard<()>; 1]>,
    ) -> Self {
        let target = usage.target();
        Self {
            mailbox: Mailbox::new(Arc::<Context>::downgrade(context), usage),
            span: trace::wait(target, target.owner(), target.mode()),
            _permits: permits,
        }
    }
}

/// Sends the first ACQUIRE at once and leaves the rest to the background.
pub(crate) fn start(request: Request) -> oneshot::Receiver<Result<Held, Error>> {
    let (reply, receiver) = oneshot::channel();
    let refusal = if request.context.background.is_closed() {
        Some(Error::shut_down())
    } else {
        let ours = request.target.owner().is_of(&request.context.id);
        (!ours).then(Error::foreign_owner)
    };
    if let Some(refusal) = refusal {
        // The receiver is in our hand: it cannot have gone.
        let _ = reply.send(Err(refusal));
        return receiver;
    }
    // An owner who waits in the queue already asks without joining it a second time.
    let permits = match request.wait_mode {
        WaitMode::None => None,
        WaitMode::Until(_) | WaitMode::Forever => {
            let permits = request.target.permits();
            let permits: Result<SmallVec<[_; 1]>, _> =
                permits.into_iter().map(Mutex::try_lock_owned).collect();
            permits.ok()
        }
    };
    let usage = request.target.claim(request.options);
    let permit = permits.map(|permits| QueuePermit::new(&request.context, &usage, permits));
    let queue = match &permit {
        None => Queue::No,
        Some(_) => request.queue(),
    };
    let attempt = Attempt {
        pending: request.context.background.counted(),
        request,
        usage,
        permit,
        reply,
    };
    // Handed over here and not in a task: calls join the queue in the order in which they were
    // made.
    match attempt
        .request
        .context
        .router
        .attached(attempt.request.target.key())
    {
        None => attempt.go_on(None),
        Some(at) => attempt.ask(queue, at),
    }
    receiver
}

/// A call whose first answer has not come yet.
struct Attempt {
    request: Request,
    usage: Usage,
    permit: Option<QueuePermit>,
    reply: Reply,
    pending: Counted,
}

impl Attempt {
    /// Sends the first ACQUIRE. What most calls come to is the lock, and that is heard where the
    /// answer arrives; a task is for those that come to something else. Only who may not wait for
    /// longer than a time has one from the beginning, to watch that time while the connection is
    /// being made.
    fn ask(self, queue: Queue, at: AttachedRoute) {
        if let WaitMode::Until(_) = self.request.wait_mode {
            let asked = Request::ask(&self.usage, queue, at);
            return self.go_on(Some(asked));
        }
        let (lease, acquire) = Request::acquire(&self.usage, queue, &at);
        let route = at.route.clone();
        route.send_then(acquire, move |answer| self.answered(at, lease, answer));
    }

    /// Brings the caller a grant on which it can count as it is. What nobody takes is dropped, and
    /// so given back.
    fn answered(self, at: AttachedRoute, lease: Reserved, answer: Result<Acquired, Error>) {
        match answer {
            Ok(Acquired::Granted { token, fresh })
                if at.route.node.acknowledger.is_none()
                    && at.is_fresh(lease.counted())
                    && !self.usage.may_have_been_released() =>
            {
                let grant = Grant {
                    token,
                    lease: lease.keep(),
                    attachment: at.attachment,
                    fresh,
                };
                let held = granted(&self.request, self.usage, self.permit, grant);
                let _ = self.reply.send(Ok(held));
            }
            answer => {
                let answer = Answer::told(answer);
                self.go_on(Some(Asked { at, lease, answer }));
            }
        }
    }

    fn go_on(self, asked: Option<Asked>) {
        let Self {
            request,
            usage,
            permit,
            reply,
            pending,
        } = self;
        let context = Arc::clone(&request.context);
        match permit {
            Some(permit) => context.background.spawn(wait::run(
                request,
                usage,
                permit,
                asked,
                Error::not_attached(),
                reply,
            )),
            None => context.background.spawn(run(request, usage, asked, reply)),
        }
        drop(pending);
    }
}

/// Makes a grant a hold, and ends the wait for it.
pub(crate) fn granted(
    request: &Request,
    usage: Usage,
    permit: Option<QueuePermit>,
    grant: Grant,
) -> Held {
    let held = Held::new(&request.context, usage, grant);
    // While the hold is known here, so that the same grant told twice is not taken for another.
    drop(permit);
    held
}

/// Asks once, without waiting in the queue.
async fn run(request: Request, usage: Usage, asked: Option<Asked>, reply: Reply) {
    let mut once = Box::pin(once(&request, &usage, asked));
    let answered = tokio::select! {
        answered = &mut once => answered,
        () = late(&request) => {
            // The caller hears that nobody knows; what is granted after that is given back.
            let _ = reply.send(Err(Error::no_reply(None)));
            return match once.await {
                Ok(Answered::Granted(grant, _)) => drop(granted(&request, usage, None, grant)),
                Ok(Answered::NotHeld { .. }) => {}
                Err(error) => request.give_up(usage, &error),
            };
        }
    };
    drop(once);
    let error = match answered {
        Ok(Answered::Granted(grant, at)) => match confirmed(&request, usage, grant, &at).await {
            Ok(held) => return deliver(held, reply).await,
            Err(error) => error,
        },
        Ok(Answered::NotHeld { lease_left }) => match request.wait_mode {
            WaitMode::None => Error::not_acquired(lease_left),
            // The usage ends here: until its turn comes, the owner has nothing at the lock.
            WaitMode::Until(_) | WaitMode::Forever => {
                drop(usage);
                return wait::in_turn(request, Error::not_acquired(lease_left), reply).await;
            }
        },
        Err(error) => {
            request.give_up(usage, &error);
            error
        }
    };
    let _ = reply.send(Err(error));
}

/// Ends when the caller has been waiting for its time, and then for as long as a reply may take:
/// the connection may have to be made before anything is asked.
async fn late(request: &Request) {
    let on_top = request.context.router.response_timeout;
    let deadline = match request.wait_mode {
        WaitMode::Until(deadline) => deadline.checked_add(on_top),
        WaitMode::None | WaitMode::Forever => None,
    };
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// A grant that was heard late, under an attachment that is over by now, or beside a release that
/// may have taken it, is renewed for a new start to count from. Where that is not answered, the
/// guard counts on what it has.
async fn confirmed(
    request: &Request,
    usage: Usage,
    grant: Grant,
    at: &AttachedRoute,
) -> Result<Held, Error> {
    let in_doubt = usage.may_have_been_released();
    if at.is_fresh(grant.lease) && !in_doubt {
        return Ok(granted(request, usage, None, grant));
    }
    let (router, target) = (&request.context.router, usage.target());
    let lease = |now| usage.lease(now);
    let renewed = renew::ask(router, target, grant.token, Aim::Hold, lease).await;
    let grant = match renewed {
        Ok(told) if told.held => grant.renewed(told.renewal),
        Ok(_) => {
            release::remains(&request.context, &usage, grant.token);
            return Err(Error::not_acquired(None));
        }
        Err(_) if in_doubt => {
            // Granted, and maybe still held.
            let error = Error::no_reply(None);
            request.give_up(usage, &error);
            return Err(error);
        }
        Err(_) => grant,
    };
    Ok(granted(request, usage, None, grant))
}

/// Brings the caller what it is granted. What nobody takes is dropped, and so given back.
pub(crate) async fn deliver(held: Held, mut reply: Reply) {
    let result = tokio::select! {
        result = held.acknowledged() => result,
        () = reply.closed() => return,
    };
    let _ = reply.send(result);
}

/// The answer to a call that does not wait in the queue.
enum Answered {
    Granted(Grant, AttachedRoute),
    NotHeld { lease_left: Option<Duration> },
}

/// The server's word, after one more try if the connection broke, after more while the session was
/// not attached, and of the node where the lock is by now.
async fn once(request: &Request, usage: &Usage, asked: Option<Asked>) -> Result<Answered, Error> {
    let (router, target) = (&request.context.router, usage.target());
    let mut asked = match asked {
        Some(asked) => asked,
        None => Request::ask(
            usage,
            Queue::No,
            router.next_within(target.key(), None).await?,
        ),
    };
    let mut detour = Redirects::new(router, target.key());
    let mut broken = None;
    loop {
        let at = asked.at.clone();
        let error = match answered(asked).await {
            Err(error) => error,
            answer => return answer,
        };
        let next = if broken.is_none() && error.is_broken_connection() && usage.is_alone() {
            // With ONCE, and so without harm even if the first has been carried out.
            broken = Some(error);
            Ok(at)
        } else {
            detour.next(error, &at.route, Some(&at.attachment)).await
        };
        let at = next.map_err(|error| match broken.clone() {
            Some(broken) => prefer_unknown(broken, error),
            None => error,
        })?;
        asked = Request::ask(usage, Queue::No, at);
    }
}

async fn answered(asked: Asked) -> Result<Answered, Error> {
    match asked.answer.await? {
        Acquired::Granted { token, fresh } => {
            let grant = Grant {
                token,
                lease: asked.lease.keep(),
                attachment: Arc::clone(&asked.at.attachment),
                fresh,
            };
            Ok(Answered::Granted(grant, asked.at))
        }
        Acquired::NotHeld { lease_left } => Ok(Answered::NotHeld { lease_left }),
        Acquired::Queued => Err(Error::no_reply(None)),
    }
}

/// Of two errors the one that leaves more open: that a later try was refused says nothing about
/// an earlier one, whose reply was lost.
pub(crate) fn prefer_unknown(first: Error, second: Error) -> Error {
    if first.is_unknown() && second.is_unavailable() {
        first
    } else {
        second
    }
}
