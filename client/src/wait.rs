//! Standing in line: `RLOCK.ACQUIRE … QUEUE`, and the event that ends it.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::attempt::{Asked, Patience, Reply, Request, Turn, worst};
use crate::backoff::Backoff;
use crate::command::{self, Acquired, News};
use crate::error::Error;
use crate::guard::Guard;
use crate::hold::Grant;
use crate::owner::Claim;
use crate::part;
use crate::session::{Attachment, Told};
use crate::trace;

/// Waits until the owner stands in line no more, and then gets in line. `last` is what the caller
/// would be told if its time were up now.
pub(crate) async fn in_turn(request: Request, last: Error, mut reply: Reply) {
    let turn = tokio::select! {
        turn = Arc::clone(&request.place.turn).lock_owned() => turn,
        end = ending(&request, &mut reply, Duration::ZERO) => return end.tell(reply, last),
    };
    let turn = Turn::new(&request, turn);
    let claim = request.place.claim(request.terms);
    run(request, claim, turn, None, reply).await;
}

/// Waits in line and tells the caller how it ended.
pub(crate) async fn run(
    request: Request,
    claim: Claim,
    turn: Turn,
    asked: Option<Asked>,
    mut reply: Reply,
) {
    let span = trace::wait(claim.name(), claim.owner());
    let mut wait = Wait {
        request: &request,
        claim,
        turn,
        last: Error::not_attached(),
        asked: false,
        in_line: false,
    };
    let outcome = span.around(wait.outcome(asked, &mut reply)).await;
    match outcome {
        Outcome::Granted(grant) => {
            let Wait {
                claim, mut turn, ..
            } = wait;
            let guard = Guard::new(&request.core, claim, grant);
            // Told before the guard was there to hear it.
            while let Some(told) = turn.mailbox.here() {
                if let News::Lost(reason) = told.news {
                    guard.lose(reason);
                }
            }
            // A guard that nobody takes is dropped, and so gives its hold back.
            let _ = reply.send(Ok(guard));
        }
        Outcome::Refused(error) => {
            let _ = reply.send(Err(error));
        }
        Outcome::Ended(end) => {
            let last = wait.last.clone();
            end.tell(reply, last);
            if wait.asked {
                wait.withdraw().await;
            }
        }
    }
}

/// How a wait ends.
enum Outcome {
    Granted(Grant),
    /// By the server's word: nothing of it is left there.
    Refused(Error),
    /// The caller waits no more, or may not; the server may not know that yet.
    Ended(Ending),
}

/// What comes next in a wait.
enum Next {
    End(Outcome),
    /// Ask again, since the session was attached anew.
    AskAgain,
    /// Ask again after a pause: the connection or the server went away.
    Pause(Error),
}

struct Wait<'a> {
    request: &'a Request,
    claim: Claim,
    turn: Turn,
    /// What the caller is told if its time is up.
    last: Error,
    /// Whether there may be something to take back.
    asked: bool,
    /// Whether the server has taken it in. Before that a lost server ends the call; after it the
    /// wait goes on until the server is back.
    in_line: bool,
}

impl Wait<'_> {
    async fn outcome(&mut self, mut asked: Option<Asked>, reply: &mut Reply) -> Outcome {
        let mut backoff = Backoff::new();
        let mut known = None;
        loop {
            let asked = match asked.take() {
                Some(asked) => asked,
                None => match self.ask(known.as_ref(), reply).await {
                    Ok(asked) => asked,
                    Err(outcome) => return outcome,
                },
            };
            self.asked = true;
            let attachment = Arc::clone(&asked.attachment);
            match self.stay(asked, reply).await {
                Next::End(outcome) => return outcome,
                Next::AskAgain => known = Some(attachment),
                Next::Pause(error) => {
                    self.last = worst(self.last.clone(), error);
                    known = None;
                    tokio::select! {
                        () = sleep(backoff.next()) => {}
                        end = ending(self.request, reply, Duration::ZERO) => {
                            return Outcome::Ended(end);
                        }
                    }
                }
            }
        }
    }

    /// Asks under an attachment other than `known`, as soon as there is one.
    async fn ask(
        &mut self,
        known: Option<&Arc<Attachment>>,
        reply: &mut Reply,
    ) -> Result<Asked, Outcome> {
        let session = &self.request.core.session;
        let patience = self.request.core.connector.response_timeout();
        let attachment = async {
            if self.in_line {
                session.next_attachment(known).await
            } else {
                session.attachment_within(patience, known).await
            }
        };
        let attachment = tokio::select! {
            attachment = attachment => attachment.map_err(told)?,
            end = ending(self.request, reply, Duration::ZERO) => return Err(Outcome::Ended(end)),
        };
        if !self.claim.is_alone() {
            // ONCE would mistake the hold of another call for ours, so it is not sent; then what
            // may still stand in line must go first. It can only be ours: it is our turn.
            let (name, owner) = (self.claim.name(), self.claim.owner().as_bytes());
            let cancel = self.request.core.driver.send(command::cancel(name, owner));
            if cancel.await.is_ok_and(|(cancelled, _)| cancelled > 0) {
                self.take_back().await;
            }
        }
        let queue = self.request.queue();
        Ok(self.request.ask(&self.claim, queue, attachment))
    }

    /// One stay in line, until the server answers or the caller waits no more.
    async fn stay(&mut self, asked: Asked, reply: &mut Reply) -> Next {
        let Asked { attachment, answer } = asked;
        // The server ends the wait itself; the time on top is for its answer to arrive.
        let on_top = self.request.core.connector.response_timeout();
        let answer = tokio::select! {
            answer = answer => answer,
            told = self.turn.mailbox.next() => return self.told(told, attachment).await,
            end = ending(self.request, reply, on_top) => return self.left(end),
        };
        match answer {
            Ok((Acquired::Granted { token }, since)) => {
                self.granted(Grant {
                    token,
                    since,
                    attachment,
                })
                .await
            }
            Ok((Acquired::NotHeld { lease_left }, _)) => refused(Error::not_acquired(lease_left)),
            Ok((Acquired::Queued, _)) => {
                self.in_line = true;
                self.queued(attachment, reply).await
            }
            Err(error) => self.failed(error),
        }
    }

    async fn queued(&mut self, attachment: Arc<Attachment>, reply: &mut Reply) -> Next {
        let on_top = self.request.core.connector.response_timeout();
        tokio::select! {
            // What has been told stands, also when the session has been attached anew since.
            biased;
            told = self.turn.mailbox.next() => self.told(told, attachment).await,
            end = ending(self.request, reply, on_top) => self.left(end),
            next = self.request.core.session.next_attachment(Some(&attachment)) => match next {
                Ok(_) => Next::AskAgain,
                Err(error) => Next::End(told(error)),
            },
        }
    }

    async fn told(&mut self, told: Told, attachment: Arc<Attachment>) -> Next {
        let since = told.since;
        match told.news {
            News::Granted { token } => {
                self.granted(Grant {
                    token,
                    since,
                    attachment,
                })
                .await
            }
            News::TimedOut { lease_left } => refused(Error::not_acquired(lease_left)),
            // The server did not keep the waiter, for it is no primary now or not ready.
            News::Failed(error) if error.is_could_not_ask() => Next::Pause(error),
            News::Failed(error) => refused(error),
            News::Lost(_) => Next::Pause(Error::not_acquired(None)),
        }
    }

    /// A grant is old by the time we know of it: the news may have lain in the socket while this
    /// process was stopped. If that leaves too little, a renewal gives a new start to count from.
    async fn granted(&self, grant: Grant) -> Next {
        let core = &self.request.core;
        let lease = self.claim.terms().lease;
        let current = core.session.attachment();
        let attached = current.is_some_and(|one| Arc::ptr_eq(&one, &grant.attachment));
        if attached && grant.since.elapsed() <= part(lease, FRESH_PART) {
            return Next::End(Outcome::Granted(grant));
        }
        let Some(attachment) = core.session.attachment() else {
            return Next::AskAgain;
        };
        let (name, owner) = (self.claim.name(), self.claim.owner().as_bytes());
        let renewal = command::renew(name, owner, lease, grant.token, &core.session.name);
        match core.driver.send_harmless(renewal).await {
            Ok((true, since)) => Next::End(Outcome::Granted(Grant {
                since,
                attachment,
                ..grant
            })),
            // Granted and run out before we knew: stand in line again.
            Ok((false, _)) => Next::Pause(Error::not_acquired(None)),
            Err(error) => Next::Pause(error),
        }
    }

    fn failed(&self, error: Error) -> Next {
        if error.is_no_session() {
            return Next::AskAgain;
        }
        // With ONCE the next ACQUIRE takes over what this one may have left behind.
        let passing = error.is_could_not_ask() || error.is_unknown() && self.claim.is_alone();
        if passing && (self.in_line || error.is_broken_connection()) {
            return Next::Pause(error);
        }
        if error.is_unknown() {
            return Next::End(told(error));
        }
        refused(error)
    }

    fn left(&mut self, end: Ending) -> Next {
        // In line, or under way to it: what the server has made of it nobody has heard.
        self.last = Error::no_reply(None);
        Next::End(Outcome::Ended(end))
    }

    /// Takes the waiter out of the line and gives back what it may have been granted meanwhile.
    ///
    /// The CANCEL goes the way of the ACQUIRE, behind it: when it is carried out there is a waiter,
    /// a hold, or nothing, and nothing comes after it. An owner minted for this call then releases
    /// whatever it has. Another may have holds of its own: there only a grant that is told is given
    /// back, now or when its event comes.
    async fn withdraw(mut self) {
        let core = &self.request.core;
        let (name, owner) = (Arc::clone(self.claim.name()), self.claim.owner().clone());
        let started = Instant::now();
        let mut backoff = Backoff::new();
        loop {
            let cancel = core.driver.send(command::cancel(&name, owner.as_bytes()));
            if self.request.own {
                let release = command::release(&name, owner.as_bytes(), None);
                let released = core.driver.send(release);
                if cancel.await.is_ok() && released.await.is_ok() {
                    return;
                }
            } else if cancel.await.is_ok() {
                return self.take_back().await;
            }
            if started.elapsed() >= WITHDRAW_FOR {
                return;
            }
            sleep(backoff.next()).await;
        }
    }

    /// The waiter has left the line: hears why, and gives back what it was granted. Left unheard,
    /// the news of this wait would be taken for that of the owner's next one here.
    async fn take_back(&mut self) {
        let patience = self.request.core.connector.response_timeout();
        if let Ok(told) = timeout(patience, self.turn.mailbox.next()).await
            && let News::Granted { token } = told.news
        {
            let (name, owner) = (self.claim.name(), self.claim.owner().as_bytes());
            let release = command::release(name, owner, Some(token));
            let _ = self.request.core.driver.send_harmless(release).await;
        }
    }
}

fn refused(error: Error) -> Next {
    Next::End(Outcome::Refused(error))
}

/// The caller hears why the wait ends; the server has yet to hear it.
fn told(error: Error) -> Outcome {
    Outcome::Ended(Ending::Told(error))
}

/// Why a caller waits no more.
enum Ending {
    Dropped,
    ShutDown,
    TimedOut,
    /// It was told why.
    Told(Error),
}

impl Ending {
    /// `last` is what a caller is told whose time is up.
    fn tell(self, reply: Reply, last: Error) {
        let error = match self {
            Self::Dropped => return,
            Self::ShutDown => Error::shut_down(),
            Self::TimedOut => last,
            Self::Told(error) => error,
        };
        // If the caller has gone in this very moment there is nobody to tell.
        let _ = reply.send(Err(error));
    }
}

/// Ends when the caller waits no more: it is gone, the client shuts down, or its time is up and
/// `on_top` of it.
async fn ending(request: &Request, reply: &mut Reply, on_top: Duration) -> Ending {
    let deadline = match request.patience {
        Patience::None => Some(Instant::now()),
        Patience::Until(deadline) => deadline.checked_add(on_top),
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

/// A grant older than this part of the lease is confirmed first.
const FRESH_PART: u32 = 3;

/// How long a waiter is called back. A server that has been silent for so long has lost the
/// connection, or is about to see it closed.
const WITHDRAW_FOR: Duration = Duration::from_secs(30);
