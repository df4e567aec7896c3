//! Waiting in line, one connection a wait: `RLOCK.ACQUIRE … BLOCK` on a connection of its own.
//!
//! All that knows about waiting connections is in this file.

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::attempt::{Patience, Reply, Request, acquire};
use crate::backoff::Backoff;
use crate::command::{self, Acquired, Block};
use crate::error::Error;
use crate::guard::Guard;
use crate::owner::Claim;
use crate::part;

/// Waits in line and tells the caller how it ended. `last` is what the caller would be told if its
/// time were up now.
pub(crate) async fn run(request: Request, mut last: Error, mut reply: Reply) {
    let place = request.place.clone();
    let _turn = tokio::select! {
        turn = place.turn.lock() => turn,
        end = ending(&request, &mut reply, Duration::ZERO) => return end.tell(reply, last),
    };
    let mut claim = place.claim(request.terms);
    let mut backoff = Backoff::new();
    loop {
        // What one stay in the queue leaves unknown, the next takes over; if there is none, it is
        // given back.
        match stay(&request, claim, &mut reply).await {
            Stay::Granted(guard) => {
                // A guard that nobody takes is dropped, and so gives its hold back.
                let _ = reply.send(Ok(guard));
                return;
            }
            Stay::Refused(error) => {
                let _ = reply.send(Err(error));
                return;
            }
            Stay::Broken(kept, error) => (claim, last) = (kept, worst(last, error)),
            Stay::Left(end, kept) => {
                end.tell(reply, last.clone());
                return request.give_up(kept, &last);
            }
            Stay::LeftInLine(end, waiter) => {
                end.tell(reply, Error::no_reply(None));
                return waiter.withdraw(&request).await;
            }
        }
        tokio::select! {
            () = sleep(backoff.next()) => {}
            end = ending(&request, &mut reply, Duration::ZERO) => {
                end.tell(reply, last.clone());
                return request.give_up(claim, &last);
            }
        }
    }
}

/// How one stay in the queue ended.
enum Stay {
    Granted(Guard),
    /// By the server's word, or with an error after which there is nothing to wait for.
    Refused(Error),
    /// The connection or the server went away; the caller still waits.
    Broken(Claim, Error),
    /// The caller waits no more, and has not been in line.
    Left(Ending, Claim),
    /// The caller waits no more, but the server does not know that yet.
    LeftInLine(Ending, Waiter),
}

/// One stay in the queue, until the server answers or the caller waits no more.
async fn stay(request: &Request, claim: Claim, reply: &mut Reply) -> Stay {
    let connection = tokio::select! {
        connection = request.core.connector.for_a_wait() => connection,
        end = ending(request, reply, Duration::ZERO) => return Stay::Left(end, claim),
    };
    let connection = match connection {
        Ok(connection) => connection,
        Err(error) => return Stay::Broken(claim, error),
    };
    let command = acquire(&claim, block(request.patience));
    let sent = Instant::now();
    let mut waiter = Waiter {
        claim,
        sent,
        answer: Box::pin(connection.ask(command)),
    };
    // The server ends the wait itself; the time on top is for its answer to arrive.
    let grace = request.core.connector.response_timeout();
    let answer = tokio::select! {
        answer = &mut waiter.answer => answer,
        end = ending(request, reply, grace) => return Stay::LeftInLine(end, waiter),
    };
    let claim = waiter.claim;
    match answer {
        Ok(Acquired::Granted { token }) => granted(request, claim, token, sent).await,
        Ok(Acquired::NotHeld { lease_left }) => Stay::Refused(Error::not_acquired(lease_left)),
        // The server did not take the waiter in, or put it out; a restart looks like this too.
        Err(error) if error.is_could_not_ask() => Stay::Broken(claim, error),
        // With ONCE the next ACQUIRE takes over what this one may have left behind. Beside
        // another hold of the owner it would be sent without, and could count twice.
        Err(error) if error.is_unknown() && claim.is_alone() => Stay::Broken(claim, error),
        Err(error) => Stay::Refused(error),
    }
}

/// Of two errors the one that leaves more open: a lost reply stays lost, whatever came after it.
fn worst(last: Error, error: Error) -> Error {
    if last.is_unknown() { last } else { error }
}

/// Makes a guard of a grant. It counts from when the ACQUIRE was sent, for nobody here knows when
/// the server granted it: the reply may have lain in the socket while this process was stopped.
/// After a long wait that leaves too little, and a renewal gives a new start to count from.
async fn granted(request: &Request, claim: Claim, token: u64, sent: Instant) -> Stay {
    let core = &request.core;
    if sent.elapsed() <= part(claim.terms().lease, FRESH_PART) {
        return Stay::Granted(Guard::new(core, claim, token, sent));
    }
    let (name, owner) = (claim.name(), claim.owner().as_bytes());
    let renewal = command::renew(name, owner, claim.terms().lease, token);
    match core.driver.send_harmless(renewal).await {
        Ok((true, sent)) => Stay::Granted(Guard::new(core, claim, token, sent)),
        // Granted and run out before we knew: stand in line again.
        Ok((false, _)) => Stay::Broken(claim, Error::not_acquired(None)),
        Err(error) => {
            drop(Guard::new(core, claim, token, sent));
            Stay::Refused(error)
        }
    }
}

/// A waiter in the server, and the reply that it will get.
struct Waiter {
    claim: Claim,
    sent: Instant,
    answer: Pin<Box<dyn Future<Output = Result<Acquired, Error>> + Send>>,
}

impl Waiter {
    /// Takes the waiter out of the queue and gives back what it may have been granted meanwhile.
    ///
    /// Closing the connection is not enough: a grant already on the wire would stay, and an
    /// ACQUIRE still in the socket could be granted after a RELEASE sent elsewhere. So the waiter
    /// is cancelled, and its reply says which of both came first.
    async fn withdraw(self, request: &Request) {
        let Self {
            claim,
            sent,
            mut answer,
        } = self;
        let core = &request.core;
        let started = Instant::now();
        let mut backoff = Backoff::new();
        while started.elapsed() < WITHDRAW_FOR {
            let cancel = command::cancel(claim.name(), claim.owner().as_bytes());
            // Told or not, the waiter's own reply decides. The CANCEL travels on another
            // connection and may arrive before the ACQUIRE; then it found nobody, and is repeated.
            let _ = core.driver.send_harmless(cancel).await;
            match timeout(backoff.next(), &mut answer).await {
                Ok(Ok(Acquired::Granted { token })) => {
                    return drop(Guard::new(core, claim, token, sent));
                }
                Ok(Ok(Acquired::NotHeld { .. })) => return,
                Ok(Err(error)) => return request.give_up(claim, &error),
                Err(_) => {}
            }
        }
        // A server that has been silent for so long has lost the connection, or is about to see it
        // closed.
        drop(answer);
        request.give_up(claim, &Error::no_reply(None));
    }
}

/// Why a caller waits no more.
enum Ending {
    Dropped,
    ShutDown,
    TimedOut,
}

impl Ending {
    /// `last` is what a caller is told whose time is up.
    fn tell(self, reply: Reply, last: Error) {
        let error = match self {
            Self::Dropped => return,
            Self::ShutDown => Error::shut_down(),
            Self::TimedOut => last,
        };
        // If the caller has gone in this very moment there is nobody to tell.
        let _ = reply.send(Err(error));
    }
}

/// Ends when the caller waits no more: it is gone, the client shuts down, or its time is up and
/// `grace` on top.
async fn ending(request: &Request, reply: &mut Reply, grace: Duration) -> Ending {
    let deadline = match request.patience {
        Patience::None => Some(Instant::now()),
        Patience::Until(deadline) => deadline.checked_add(grace),
        Patience::Forever => None,
    };
    let time_up = async {
        match deadline {
            Some(deadline) => sleep_until(deadline).await,
            None => std::future::pending().await,
        }
    };
    tokio::select! {
        () = reply.closed() => Ending::Dropped,
        () = request.core.background.closed() => Ending::ShutDown,
        () = time_up => Ending::TimedOut,
    }
}

fn block(patience: Patience) -> Block {
    match patience {
        Patience::None => Block::No,
        Patience::Until(deadline) => Block::For(deadline.saturating_duration_since(Instant::now())),
        Patience::Forever => Block::Forever,
    }
}

/// A grant older than this part of the lease, counted from the ACQUIRE, is confirmed first.
const FRESH_PART: u32 = 3;

/// How long a waiter is called back before its connection is closed on it.
const WITHDRAW_FOR: Duration = Duration::from_secs(30);
