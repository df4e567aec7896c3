//! Renewing holds: one, or many behind one another without waiting in between.

use std::future::ready;
use std::sync::Arc;

use futures_util::stream::{self, StreamExt};
use tokio::task::coop::consume_budget;
use tokio::time::{Instant, sleep};

use crate::flows::Context;
use crate::ledger::{Hold, Renewal, Reserved, Target};
use crate::topology::{Route, Router};
use crate::wire::{Attachment, Mode, request};
use crate::{Backoff, Error, metrics, trace};

/// What to ask for where grants must be acknowledged: see [`Acknowledger`]. Elsewhere it is the
/// same.
///
/// [`Acknowledger`]: crate::wire::Acknowledger
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aim {
    /// The server's word that it is held, for the present session. It comes at once, however slow
    /// the replicas are, and the lease ends as before.
    Hold,
    /// A lease that counts, once enough have it.
    Lease,
}

/// Renews what has this token, or its owner's hold whatever its token, where it is by now, with a
/// lease that is to be asked for when the command is sent.
pub(crate) async fn ask(
    router: &Router,
    target: &Target,
    token: impl Into<Option<u64>>,
    (aim, wanted): (Aim, bool),
    lease: impl Fn(Instant) -> Reserved,
) -> Result<Renewal, Error> {
    let (token, lease) = (token.into(), &lease);
    let once = |route: Route, attachment: Option<Arc<Attachment>>| async move {
        let name = &route.node.session.name;
        let turn = target.turn();
        // The time that goes by counts: the lease may begin when this is sent.
        let lease = lease(Instant::now());
        let renewal = request::renew(target.subject(), lease.lease.length, token, name);
        let renewal = renewal
            .wanted(wanted)
            .only_for(attachment.as_ref().and_then(|one| one.server()));
        let (held, acknowledged) = match &route.node.acknowledger {
            Some(acknowledger) if aim == Aim::Lease => {
                // It goes another way, but in order with the others that do: each grant counts on
                // one of them.
                let answer = acknowledger.renew(route.address(renewal));
                drop(turn);
                let (held, by_enough) = answer.await?;
                (held, Some(by_enough))
            }
            acknowledger => {
                let answer = route.send(renewal);
                drop(turn);
                (answer.await?, acknowledger.is_none().then_some(Ok(())))
            }
        };
        Ok(Renewal {
            held,
            lease: lease.answered(held),
            attachment,
            acknowledged,
        })
    };
    router.carry_out(target.key(), true, once).await
}

/// The same for a hold. While it listens, the session is to be told when the lock is wanted: by a
/// server that knows the word. An older one refuses the whole command, and the hold must not go for
/// that.
pub(crate) async fn ask_about(
    router: &Router,
    hold: &Hold,
    aim: Aim,
    lease: impl Fn(Instant) -> Reserved,
) -> Result<Renewal, Error> {
    let wanted = hold.is_to_hear();
    let told = ask(router, &hold.target, hold.token, (aim, wanted), &lease).await;
    let refused = match told {
        Err(error) if wanted && error.is_refused() => error,
        told => return told,
    };
    let told = ask(router, &hold.target, hold.token, (aim, false), lease).await;
    // Otherwise it refuses everything just now, as while it is loading.
    if told.is_ok() {
        hold.wanted.failed(Some(refused));
    }
    told
}

/// Whether the server has several locks by the tokens of this hold. To the command for all it says
/// that the owner has them, and not by which of its holds: one of them may have been broken, and
/// taken again with others. One that seemed to be entered once more has this grant's own token
/// should what it entered have been lost.
pub(crate) async fn has_tokens(
    router: &Router,
    hold: &Arc<Hold>,
    lease: impl Fn(Instant) -> Reserved,
) -> Result<bool, Error> {
    for name in &hold.target.names {
        let (one, kept) = (hold.target.one(name), hold.token_at(name));
        let mut found = false;
        for token in [kept, hold.token] {
            found = found
                || ask(router, &one, token, (Aim::Hold, false), &lease)
                    .await?
                    .held;
        }
        if !found {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Renews a hold, and takes note of that: why not, if it is not so now.
pub(crate) async fn renew(
    router: &Router,
    hold: &Arc<Hold>,
    aim: Aim,
    lease: impl Fn(&Hold, Instant) -> Reserved,
) -> Result<(), Error> {
    let lease = |now| lease(hold, now);
    let _turn = hold.renewing.lock().await;
    let (attachment, before) = (hold.attachment(), hold.look(Instant::now()));
    let mut told = ask_about(router, hold, aim, &lease).await;
    // Word of a loss may have gone with the connection, and what is held may be another grant.
    if let Ok(told) = &mut told
        && told.held
        && !hold.target.mode.has_token()
        && let Some(present) = &told.attachment
        && !Arc::ptr_eq(present, &attachment)
        && hold.was_meant(&before, Instant::now()) != Some(true)
    {
        // A writer's names no token: it is asked about again.
        if hold.target.mode == Mode::Write {
            return Err(Error::not_attached());
        }
        told.held = has_tokens(router, hold, &lease).await?;
    }
    metrics::renewed(told.as_ref().ok().map(|told| told.held));
    let told = told?;
    // It could not ask whether these are wanted: whoever listens asks again.
    if hold.target.mode == Mode::Several {
        hold.wanted.ask_anew();
    }
    let still = hold.renewed(&told, Instant::now());
    still.map_err(Error::lost)?;
    told.acknowledged.unwrap_or(Ok(()))
}

/// Renews these, those with a lease of their own only up to the end they have. Those of which
/// nothing was learned, or not enough have the lease. Other tasks run in between.
pub(crate) async fn renew_all(router: &Router, holds: Vec<Arc<Hold>>, aim: Aim) -> Vec<Arc<Hold>> {
    let span = trace::renew(holds.len());
    let asked = stream::iter(holds).map(|hold| async move {
        // What is passed over takes time as well, and may be all of them.
        consume_budget().await;
        // What nobody else has any more has been given back.
        if Arc::strong_count(&hold) == 1 || hold.lost(Instant::now()).is_some() {
            return None;
        }
        let error = renew(router, &hold, aim, Hold::kept).await.err()?;
        // Of a loss the guard says why. A refusal is no word of one: the server may be loading, or
        // have been made a replica. The guard hears of it when its lease ends unconfirmed.
        (!error.is_lost()).then_some(hold)
    });
    let unconfirmed = asked.buffer_unordered(AT_ONCE).filter_map(ready).collect();
    span.around(unconfirmed).await
}

/// Has these confirmed, again and again until each is or was found lost, or this is of no use any
/// more. A server that is loading, or a cluster that has just lost a node, says no to all at first.
pub(crate) async fn confirm(
    context: Arc<Context>,
    mut holds: Vec<Arc<Hold>>,
    is_of_use: impl Fn() -> bool,
) {
    let mut backoff = Backoff::new();
    while !holds.is_empty() && is_of_use() {
        holds = renew_all(&context.router, holds, Aim::Hold).await;
        if !holds.is_empty() {
            sleep(backoff.next()).await;
        }
    }
}

/// So many renewals are under way at most: each takes about a kilobyte meanwhile.
pub(crate) const AT_ONCE: usize = 4096;
