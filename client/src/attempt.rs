//! One call of `lock()`, from the first command to the guard. It runs apart from its caller, so
//! that the caller may be dropped at any moment.

use std::sync::Arc;

use tokio::sync::oneshot;
use tokio::time::Instant;

use crate::client::Core;
use crate::command::{self, Acquired, Block, Command};
use crate::driver::Answer;
use crate::error::Error;
use crate::guard::Guard;
use crate::owner::{Claim, Place, Terms};
use crate::release;
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
}

/// Where the caller listens. A guard that cannot be delivered is dropped, and so gives its hold
/// back.
pub(crate) type Reply = oneshot::Sender<Result<Guard, Error>>;

/// The ACQUIRE for a claim; with ONCE, and so harmless to send again, if nothing else of its owner
/// is at the lock.
pub(crate) fn acquire(claim: &Claim, block: Block) -> Command<Acquired> {
    let (name, owner) = (claim.name(), claim.owner().as_bytes());
    command::acquire(name, owner, claim.terms().lease, block, claim.is_alone())
}

/// Sends the first ACQUIRE at once and leaves the rest to the background.
pub(crate) fn start(request: Request) -> oneshot::Receiver<Result<Guard, Error>> {
    let (reply, answer) = oneshot::channel();
    if request.core.background.is_closed() {
        // The receiver is in our hand: it cannot have gone.
        let _ = reply.send(Err(Error::shut_down()));
        return answer;
    }
    let claim = request.place.claim(request.terms);
    let first = request.core.driver.send(acquire(&claim, Block::No));
    let core = Arc::clone(&request.core);
    core.background.spawn(run(request, claim, first, reply));
    answer
}

/// An uncontended lock is taken here, in one round trip.
async fn run(request: Request, claim: Claim, first: Answer<Acquired>, reply: Reply) {
    let core = &request.core;
    let answer = match first.await {
        // With ONCE, and so without harm even if the first has been carried out.
        Err(error) if error.is_broken_connection() && claim.is_alone() => {
            let second = core.driver.send(acquire(&claim, Block::No));
            second.await.map_err(|again| worse(error, again))
        }
        answer => answer,
    };
    let result = match answer {
        Ok((Acquired::Granted { token }, sent)) => Ok(Guard::new(core, claim, token, sent)),
        Ok((Acquired::NotHeld { lease_left }, _)) => match request.patience {
            Patience::None => Err(Error::not_acquired(lease_left)),
            // The claim ends here: until its turn comes, the owner has nothing at the lock.
            Patience::Until(_) | Patience::Forever => {
                drop(claim);
                return wait::run(request, Error::not_acquired(lease_left), reply).await;
            }
        },
        Err(error) => {
            request.give_up(claim, &error);
            Err(error)
        }
    };
    let _ = reply.send(result);
}

/// That the second try was refused says nothing about the first, whose reply was lost.
fn worse(first: Error, second: Error) -> Error {
    if second.is_could_not_ask() {
        first
    } else {
        second
    }
}
