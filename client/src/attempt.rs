//! One call of `lock()`, from the first command to the guard. It goes on apart from its caller, so
//! that the caller may be dropped at any moment.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Mutex, OwnedMutexGuard, oneshot};
use tokio::time::{Instant, sleep_until};

use crate::background::Counted;
use crate::client::Core;
use crate::command::{self, Acquired, Command, News, Queue};
use crate::detour::Detour;
use crate::driver::Answer;
use crate::error::Error;
use crate::guard::Held;
use crate::hold::{Grant, LostReason};
use crate::nodes::Reached;
use crate::owner::{Claim, Reserved, Target, Terms};
use crate::registry::{self, Mailbox};
use crate::release;
use crate::renewal;
use crate::trace;
use crate::wait;

/// How long a caller waits for a lock that is taken.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience {
    None,
    Until(Instant),
    Forever,
}

impl Patience {
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
    pub(crate) core: Arc<Core>,
    pub(crate) target: Arc<Target>,
    pub(crate) terms: Terms,
    pub(crate) patience: Patience,
    /// Whether the owner was minted for this call: until there is a guard nobody else can have it.
    pub(crate) own: bool,
}

impl Request {
    /// Gives back what the server may have granted without our knowing.
    ///
    /// No token is known, so this would take any hold of the owner. So it is not done where the
    /// owner has others: what is left over ends with its lease, or when that owner comes again.
    pub(crate) fn give_up(&self, claim: Claim, error: &Error) {
        if error.is_unknown() {
            release::in_background(&self.core, claim, None);
        }
    }

    /// The ACQUIRE for a claim, handed over now; with ONCE, and so harmless to send again, if
    /// nothing else of its owner is at the lock.
    pub(crate) fn ask(claim: &Claim, queue: Queue, at: Reached) -> Asked {
        let (lease, acquire) = Self::acquire(claim, queue, &at);
        let answer = at.site.send(acquire);
        Asked { at, lease, answer }
    }

    fn acquire(claim: &Claim, queue: Queue, at: &Reached) -> (Reserved, Command<Acquired>) {
        let (target, session) = (claim.target(), &at.site.node.session.name);
        let lease = claim.lease();
        let (subject, once) = (target.subject(), claim.is_alone());
        let acquire = command::acquire(subject, lease.lease.length, queue, session, once);
        (lease, acquire.under(Some(&at.attachment)))
    }

    /// How long to stand in line.
    pub(crate) fn queue(&self) -> Queue {
        match self.patience {
            Patience::None => Queue::No,
            Patience::Forever => Queue::Forever,
            Patience::Until(deadline) => {
                Queue::For(deadline.saturating_duration_since(Instant::now()))
            }
        }
    }
}

/// An ACQUIRE under way.
pub(crate) struct Asked {
    pub(crate) at: Reached,
    pub(crate) lease: Reserved,
    pub(crate) answer: Answer<Acquired>,
}

/// Where the caller listens. What is held and cannot be delivered is dropped, and so given back.
pub(crate) type Reply = oneshot::Sender<Result<Held, Error>>;

/// The right to stand in line for this owner, and what is heard there.
pub(crate) struct Turn {
    pub(crate) mailbox: Mailbox,
    /// A loss that was told while no grant was known: of an earlier hold of the owner, or of the
    /// one whose grant is yet to be heard.
    pub(crate) lost: Option<LostReason>,
    pub(crate) span: trace::Span,
    _turns: Vec<OwnedMutexGuard<()>>,
}

impl Turn {
    pub(crate) fn new(core: &Core, claim: &Claim, turns: Vec<OwnedMutexGuard<()>>) -> Self {
        Self {
            mailbox: registry::listen(&core.nodes, claim),
            lost: None,
            span: trace::wait(claim.target()),
            _turns: turns,
        }
    }
}

/// Sends the first ACQUIRE at once and leaves the rest to the background.
pub(crate) fn start(request: Request) -> oneshot::Receiver<Result<Held, Error>> {
    let (reply, receiver) = oneshot::channel();
    let refusal = if request.core.background.is_closed() {
        Some(Error::shut_down())
    } else {
        let ours = request.target.owner().is_of(&request.core.id);
        (!ours).then(Error::foreign_owner)
    };
    if let Some(refusal) = refusal {
        // The receiver is in our hand: it cannot have gone.
        let _ = reply.send(Err(refusal));
        return receiver;
    }
    // An owner who stands in line already asks without getting in line a second time.
    let turns = match request.patience {
        Patience::None => None,
        Patience::Until(_) | Patience::Forever => {
            let turns = request.target.turns();
            let turns: Result<Vec<_>, _> = turns.map(Mutex::try_lock_owned).collect();
            turns.ok()
        }
    };
    let claim = request.target.claim(request.terms);
    let turn = turns.map(|turns| Turn::new(&request.core, &claim, turns));
    let queue = match &turn {
        None => Queue::No,
        Some(_) => request.queue(),
    };
    let attempt = Attempt {
        pending: request.core.background.counted(),
        request,
        claim,
        turn,
        reply,
    };
    // Handed over here and not in a task: calls get in line in the order in which they were made.
    match attempt.request.core.nodes.reached(&attempt.request.target) {
        None => attempt.go_on(None),
        Some(at) => attempt.ask(queue, at),
    }
    receiver
}

/// A call whose first answer has not come yet.
struct Attempt {
    request: Request,
    claim: Claim,
    turn: Option<Turn>,
    reply: Reply,
    pending: Counted,
}

impl Attempt {
    /// Sends the first ACQUIRE. What most calls come to is the lock, and that is heard where the
    /// answer arrives; a task is for those that come to something else. Only who may not wait for
    /// longer than a time has one from the beginning, to watch that time while the connection is
    /// being made.
    fn ask(self, queue: Queue, at: Reached) {
        if let Patience::Until(_) = self.request.patience {
            let asked = Request::ask(&self.claim, queue, at);
            return self.go_on(Some(asked));
        }
        let (lease, acquire) = Request::acquire(&self.claim, queue, &at);
        let site = at.site.clone();
        site.send_then(acquire, move |answer| self.answered(at, lease, answer));
    }

    /// Brings the caller a grant on which it can count as it is. What nobody takes is dropped, and
    /// so given back.
    fn answered(self, at: Reached, lease: Reserved, answer: Result<Acquired, Error>) {
        match answer {
            Ok(Acquired::Granted { token, fresh })
                if at.site.node.acknowledger.is_none() && at.is_fresh(lease.counted()) =>
            {
                let grant = Grant {
                    token,
                    lease: lease.keep(),
                    attachment: at.attachment,
                    fresh,
                };
                let held = granted(&self.request, self.claim, self.turn, grant);
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
            claim,
            turn,
            reply,
            pending,
        } = self;
        let core = Arc::clone(&request.core);
        match turn {
            Some(turn) => core
                .background
                .spawn(wait::run(request, claim, turn, asked, reply)),
            None => core.background.spawn(run(request, claim, asked, reply)),
        }
        drop(pending);
    }
}

/// Makes a grant a hold, and ends the wait for it.
pub(crate) fn granted(request: &Request, claim: Claim, turn: Option<Turn>, grant: Grant) -> Held {
    let held = Held::new(&request.core, claim, grant);
    let Some(mut turn) = turn else {
        return held;
    };
    // Told before the hold was there to hear it. The event does not say which hold it is about.
    while let Some(told) = turn.mailbox.here() {
        if let News::Lost(reason) = told.news {
            turn.lost = Some(reason);
        }
    }
    if let Some(reason) = turn.lost {
        held.verify(reason);
    }
    // While the hold is known here, so that the same grant told twice is not taken for another.
    drop(turn);
    held
}

/// Asks once, without standing in line.
async fn run(request: Request, claim: Claim, asked: Option<Asked>, reply: Reply) {
    let mut once = Box::pin(once(&request, &claim, asked));
    let answered = tokio::select! {
        answered = &mut once => answered,
        () = late(&request) => {
            // The caller hears that nobody knows; what is granted after that is given back.
            let _ = reply.send(Err(Error::no_reply(None)));
            return match once.await {
                Ok(Answered::Granted(grant, _)) => drop(granted(&request, claim, None, grant)),
                Ok(Answered::NotHeld { .. }) => {}
                Err(error) => request.give_up(claim, &error),
            };
        }
    };
    drop(once);
    let error = match answered {
        Ok(Answered::Granted(grant, at)) => {
            let held = confirmed(&request, claim, grant, &at).await;
            return deliver(held, reply).await;
        }
        Ok(Answered::NotHeld { lease_left }) => match request.patience {
            Patience::None => Error::not_acquired(lease_left),
            // The claim ends here: until its turn comes, the owner has nothing at the lock.
            Patience::Until(_) | Patience::Forever => {
                drop(claim);
                return wait::in_turn(request, Error::not_acquired(lease_left), reply).await;
            }
        },
        Err(error) => {
            request.give_up(claim, &error);
            error
        }
    };
    let _ = reply.send(Err(error));
}

/// Ends when the caller has been waiting for its time, and then for as long as a reply may take:
/// the connection may have to be made before anything is asked.
async fn late(request: &Request) {
    let on_top = request.core.nodes.response_timeout;
    let deadline = match request.patience {
        Patience::Until(deadline) => deadline.checked_add(on_top),
        Patience::None | Patience::Forever => None,
    };
    match deadline {
        Some(deadline) => sleep_until(deadline).await,
        None => std::future::pending().await,
    }
}

/// A grant that was heard late, or under an attachment that is over by now, is renewed for a new
/// start to count from. Where that is not answered, the guard counts on what it has.
async fn confirmed(request: &Request, claim: Claim, grant: Grant, at: &Reached) -> Held {
    if at.is_fresh(grant.lease) {
        return granted(request, claim, None, grant);
    }
    let (nodes, target) = (&request.core.nodes, claim.target());
    let renewed = renewal::renew(nodes, target, grant.token, || claim.lease()).await;
    match renewed {
        Ok((true, renewal)) => {
            let attachment = renewal.attachment.unwrap_or(grant.attachment);
            let lease = renewal.lease;
            let grant = Grant {
                lease,
                attachment,
                ..grant
            };
            granted(request, claim, None, grant)
        }
        Ok((false, _)) => {
            let held = granted(request, claim, None, grant);
            held.lose(LostReason::NotHeld);
            held
        }
        Err(_) => granted(request, claim, None, grant),
    }
}

/// Brings the caller what it is granted. What nobody takes is dropped, and so given back.
pub(crate) async fn deliver(held: Held, mut reply: Reply) {
    let result = tokio::select! {
        result = held.acknowledged() => result,
        () = reply.closed() => return,
    };
    let _ = reply.send(result);
}

/// The answer to who does not stand in line.
enum Answered {
    Granted(Grant, Reached),
    NotHeld { lease_left: Option<Duration> },
}

/// The server's word, after one more try if the connection broke or the session was not attached,
/// and of the node where the lock is by now.
async fn once(request: &Request, claim: &Claim, asked: Option<Asked>) -> Result<Answered, Error> {
    let (nodes, target) = (&request.core.nodes, claim.target());
    let mut asked = match asked {
        Some(asked) => asked,
        None => Request::ask(claim, Queue::No, nodes.next_within(target, None).await?),
    };
    let mut detour = Detour::new(nodes, target);
    let mut broken = None;
    loop {
        let at = asked.at.clone();
        let error = match answered(asked).await {
            Err(error) => error,
            answer => return answer,
        };
        let next = if broken.is_none() && error.is_broken_connection() && claim.is_alone() {
            // With ONCE, and so without harm even if the first has been carried out.
            broken = Some(error);
            Ok(at)
        } else {
            detour.next(error, &at.site, Some(&at.attachment)).await
        };
        let at = next.map_err(|error| match broken.clone() {
            Some(broken) => worst(broken, error),
            None => error,
        })?;
        asked = Request::ask(claim, Queue::No, at);
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
pub(crate) fn worst(first: Error, second: Error) -> Error {
    if first.is_unknown() && second.is_could_not_ask() {
        first
    } else {
        second
    }
}
