//! One call of `lock()`, from the first command to the guard. It runs apart from its caller, so
//! that the caller may be dropped at any moment.

use std::sync::Arc;

use tokio::sync::{OwnedMutexGuard, oneshot};
use tokio::time::Instant;

use crate::client::Core;
use crate::command::{self, Acquired, Command, Queue};
use crate::driver::Answer;
use crate::error::Error;
use crate::guard::Guard;
use crate::hold::Grant;
use crate::owner::{Claim, Place, Terms};
use crate::release;
use crate::session::{Attachment, Mailbox};
use crate::wait;

/// How long a caller waits for a lock that is taken.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Patience {
    None,
    Until(Instant),
    Forever,
}

/// What a caller asked for.
pub(crate) struct Request {
    pub(crate) core: Arc<Core>,
    pub(crate) place: Arc<Place>,
    pub(crate) terms: Terms,
    pub(crate) patience: Patience,
    /// Whether the owner was minted for this call: until there is a guard nobody else can have it.
    pub(crate) own: bool,
}

impl Request {
    /// Gives back what the server may have granted without our knowing.
    ///
    /// No token is known, so this would take any hold of the owner, also one that another call
    /// gets for it before this is carried out. So it is not done for an owner that came from the
    /// caller: what is left over ends with its lease, or when that owner comes again.
    pub(crate) fn give_up(&self, claim: Claim, error: &Error) {
        if error.is_unknown() && self.own {
            release::in_background(&self.core, claim, None);
        }
    }

    /// The ACQUIRE for a claim, handed over now; with ONCE, and so harmless to send again, if
    /// nothing else of its owner is at the lock.
    pub(crate) fn ask(&self, claim: &Claim, queue: Queue, attachment: Arc<Attachment>) -> Asked {
        Asked {
            attachment,
            answer: self.core.driver.send(self.acquire(claim, queue)),
        }
    }

    fn acquire(&self, claim: &Claim, queue: Queue) -> Command<Acquired> {
        let (name, owner) = (claim.name(), claim.owner().as_bytes());
        let (lease, once) = (claim.terms().lease, claim.is_alone());
        command::acquire(name, owner, lease, queue, &self.core.session.name, once)
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
    /// What the session was attached by before.
    pub(crate) attachment: Arc<Attachment>,
    pub(crate) answer: Answer<Acquired>,
}

/// Where the caller listens. A guard that cannot be delivered is dropped, and so gives its hold
/// back.
pub(crate) type Reply = oneshot::Sender<Result<Guard, Error>>;

/// The right to stand in line for this owner, and what is heard there.
pub(crate) struct Turn {
    pub(crate) mailbox: Mailbox,
    _turn: OwnedMutexGuard<()>,
}

impl Turn {
    pub(crate) fn new(request: &Request, turn: OwnedMutexGuard<()>) -> Self {
        Self {
            mailbox: request.core.session.listen(&request.place),
            _turn: turn,
        }
    }
}

/// Sends the first ACQUIRE at once and leaves the rest to the background.
pub(crate) fn start(request: Request) -> oneshot::Receiver<Result<Guard, Error>> {
    let (reply, answer) = oneshot::channel();
    if request.core.background.is_closed() {
        // The receiver is in our hand: it cannot have gone.
        let _ = reply.send(Err(Error::shut_down()));
        return answer;
    }
    // An owner who stands in line already asks without getting in line a second time.
    let turn = match request.patience {
        Patience::None => None,
        Patience::Until(_) | Patience::Forever => {
            let turn = Arc::clone(&request.place.turn).try_lock_owned().ok();
            turn.map(|turn| Turn::new(&request, turn))
        }
    };
    let claim = request.place.claim(request.terms);
    let queue = match &turn {
        None => Queue::No,
        Some(_) => request.queue(),
    };
    // Handed over here and not in the task: calls get in line in the order in which they were made.
    let attachment = request.core.session.attachment();
    let asked = attachment.map(|attachment| request.ask(&claim, queue, attachment));
    let core = Arc::clone(&request.core);
    match turn {
        Some(turn) => core
            .background
            .spawn(wait::run(request, claim, turn, asked, reply)),
        None => core.background.spawn(run(request, claim, asked, reply)),
    }
    answer
}

/// Asks once, without standing in line.
async fn run(request: Request, claim: Claim, asked: Option<Asked>, reply: Reply) {
    let result = match once(&request, &claim, asked).await {
        Ok((Acquired::Granted { token }, grant)) => {
            let (since, attachment) = grant;
            let grant = Grant {
                token,
                since,
                attachment,
            };
            Ok(Guard::new(&request.core, claim, grant))
        }
        Ok((Acquired::Queued, _)) => Err(Error::no_reply(None)),
        Ok((Acquired::NotHeld { lease_left }, _)) => match request.patience {
            Patience::None => Err(Error::not_acquired(lease_left)),
            // The claim ends here: until its turn comes, the owner has nothing at the lock.
            Patience::Until(_) | Patience::Forever => {
                drop(claim);
                return wait::in_turn(request, Error::not_acquired(lease_left), reply).await;
            }
        },
        Err(error) => {
            request.give_up(claim, &error);
            Err(error)
        }
    };
    let _ = reply.send(result);
}

type Answered = (Acquired, (Instant, Arc<Attachment>));

/// The server's word, after one more try if the connection broke or the session was not attached.
async fn once(request: &Request, claim: &Claim, asked: Option<Asked>) -> Result<Answered, Error> {
    let core = &request.core;
    let patience = core.connector.response_timeout();
    let asked = if let Some(asked) = asked {
        asked
    } else {
        let attachment = core.session.attachment_within(patience, None).await?;
        request.ask(claim, Queue::No, attachment)
    };
    let Asked { attachment, answer } = asked;
    let error = match answer.await {
        Ok((acquired, sent)) => return Ok((acquired, (sent, attachment))),
        Err(error) => error,
    };
    let attachment = if error.is_no_session() {
        let next = core.session.attachment_within(patience, Some(&attachment));
        next.await.map_err(|_| error.clone())?
    } else if error.is_broken_connection() && claim.is_alone() {
        // With ONCE, and so without harm even if the first has been carried out.
        attachment
    } else {
        return Err(error);
    };
    let Asked { attachment, answer } = request.ask(claim, Queue::No, attachment);
    match answer.await {
        Ok((acquired, sent)) => Ok((acquired, (sent, attachment))),
        Err(again) => Err(worst(error, again)),
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
