//! Renewing holds: many of them behind one another, without waiting in between.

use std::sync::Arc;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use crate::backoff::Backoff;
use crate::error::Error;
use crate::flows::Context;
use crate::ledger::{Hold, Renewal, Reserved, Target};
use crate::topology::{MAX_REDIRECTS, Redirects, Route, Router};
use crate::trace;
use crate::wire::connection::ServerId;
use crate::wire::durability::Acknowledged;
use crate::wire::request::{self, Command};
use crate::wire::session::Attachment;

/// Renews these holds, those with a lease of their own only up to the end they have; again and
/// again until each was confirmed or found lost, or this is of no use any more. A server that is
/// loading, or a cluster that has just lost a node, says no to all at first.
pub(crate) async fn confirm(
    context: &Arc<Context>,
    mut holds: Vec<Arc<Hold>>,
    is_of_use: impl Fn() -> bool,
) {
    let mut backoff = Backoff::new();
    loop {
        // What nobody else has any more has been given back.
        holds.retain(|hold| Arc::strong_count(hold) > 1 && hold.lost(Instant::now()).is_none());
        if holds.is_empty() || !is_of_use() {
            return;
        }
        let mut asked = JoinSet::new();
        for (route, holds) in by_route(&context.router, std::mem::take(&mut holds)) {
            let context = Arc::clone(context);
            let unconfirmed =
                async move { unconfirmed_at(&context.router, route, holds, Aim::Hold).await };
            asked.spawn(unconfirmed);
        }
        while let Some(unconfirmed) = asked.join_next().await {
            holds.extend(unconfirmed.unwrap_or_default());
        }
        if !holds.is_empty() {
            sleep(backoff.next()).await;
        }
    }
}

/// What to ask for where grants must be acknowledged. Elsewhere it is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aim {
    /// The server's word that it is held, for the present session. It comes at once, however slow
    /// the replicas are, and the lease ends as before.
    Hold,
    /// A lease that counts, once enough have it.
    Lease,
}

/// Renews the leases of holds at one route: whether of each, or it was found lost.
pub(crate) async fn extend_at(router: &Router, route: Route, holds: Vec<Arc<Hold>>) -> bool {
    let left = unconfirmed_at(router, route, holds, Aim::Lease).await;
    left.is_empty()
}

/// Renews holds at one route: those of which that was not learned which was asked for.
async fn unconfirmed_at(
    router: &Router,
    route: Route,
    holds: Vec<Arc<Hold>>,
    aim: Aim,
) -> Vec<Arc<Hold>> {
    let mut unconfirmed = Vec::new();
    for (hold, told) in ask(router, route, holds, aim).await {
        match told {
            // Whether it was lost the guard will say.
            Ok((held, renewal)) => {
                let enough = !held || renewal.acknowledged || aim == Aim::Hold;
                let _ = hold.renewed(held, &renewal, Instant::now());
                if !enough {
                    unconfirmed.push(hold);
                }
            }
            // A refusal is no word of a loss: the server may be loading, or have been made a
            // replica. The guard hears of it when its lease ends unconfirmed.
            Err(_) => unconfirmed.push(hold),
        }
    }
    unconfirmed
}

/// What the server said of one hold.
pub(crate) type RenewalAnswer = Result<(bool, Renewal), Error>;

/// Renews one hold, with a lease that is to be asked for when it is sent. No acknowledgement is
/// waited for.
pub(crate) async fn renew(
    router: &Router,
    target: &Target,
    token: u64,
    lease: impl Fn() -> Reserved,
) -> RenewalAnswer {
    let mut detour = Redirects::new(router, target.key());
    let mut route = router.route(target.key());
    let mut attachment = route.node.session.attachment();
    loop {
        let lease = lease();
        let session = &route.node.session.name;
        let renewal = request::renew(target.subject(), lease.lease.length, Some(token), session);
        let renewal = renewal.only_for(server_of(attachment.as_ref()));
        let error = match route.send_idempotent(renewal).await {
            Ok(held) => {
                let renewal = Renewal {
                    lease: lease.answered(held),
                    attachment,
                    acknowledged: route.node.acknowledger.is_none(),
                };
                return Ok((held, renewal));
            }
            Err(error) => error,
        };
        let next = detour.next(error, &route, attachment.as_ref()).await?;
        (route, attachment) = (next.route, Some(next.attachment));
    }
}

/// The holds to ask about at one route.
pub(crate) type Group = (Route, Vec<Arc<Hold>>);

/// Holds by where they are.
pub(crate) fn by_route(router: &Router, holds: Vec<Arc<Hold>>) -> Vec<Group> {
    let mut groups = Vec::new();
    for hold in holds {
        add(&mut groups, router.route(hold.target().key()), hold);
    }
    groups
}

fn add(groups: &mut Vec<Group>, route: Route, hold: Arc<Hold>) {
    match groups.iter_mut().find(|(other, _)| other.is_same(&route)) {
        Some((_, holds)) => holds.push(hold),
        None => groups.push((route, vec![hold])),
    }
}

/// Asks at one route, and about what is not there where that sends us: one reply a hold.
pub(crate) async fn ask(
    router: &Router,
    route: Route,
    holds: Vec<Arc<Hold>>,
    aim: Aim,
) -> Vec<(Arc<Hold>, RenewalAnswer)> {
    let mut told = Vec::with_capacity(holds.len());
    let mut groups = vec![(route, holds)];
    for hop in 0..=MAX_REDIRECTS {
        let mut elsewhere = Vec::new();
        for (route, holds) in groups {
            // A node that we are sent to may be a new one. Why it cannot be reached it says itself.
            if hop > 0 {
                let _ = router.reach(route.clone()).await;
            }
            let replies = ask_at(&route, &holds, aim).await;
            for (hold, reply) in holds.into_iter().zip(replies) {
                let error = reply.as_ref().err();
                match error.and_then(|error| router.redirected(error, &route)) {
                    Some(there) if hop < MAX_REDIRECTS => add(&mut elsewhere, there, hold),
                    _ => told.push((hold, reply)),
                }
            }
        }
        groups = elsewhere;
        if groups.is_empty() {
            break;
        }
    }
    told
}

/// One reply a hold, all of one route.
async fn ask_at(route: &Route, holds: &[Arc<Hold>], aim: Aim) -> Vec<RenewalAnswer> {
    let session = &route.node.session;
    // Taken before anything is sent: what is confirmed now counts on this attachment or a later.
    let attachment = session.attachment();
    let leases: Vec<_> = holds.iter().map(|hold| hold.kept(Instant::now())).collect();
    let commands: Vec<_> = holds
        .iter()
        .zip(&leases)
        .map(|(hold, lease)| hold.renewal(lease.lease, &session.name))
        .map(|renewal| renewal.only_for(server_of(attachment.as_ref())))
        .collect();
    let span = trace::renew(commands.len());
    let replies = span.around(replies_at(route, commands, aim)).await;
    let told = replies.into_iter().zip(leases).map(|(reply, lease)| {
        let (held, acknowledged) = reply?;
        let renewal = Renewal {
            lease: lease.answered(held),
            attachment: attachment.clone(),
            acknowledged,
        };
        Ok((held, renewal))
    });
    told.collect()
}

/// Whether each is held, and whether its lease counts. All of them share one wait.
async fn replies_at(
    route: &Route,
    renewals: Vec<Command<bool>>,
    aim: Aim,
) -> Vec<Result<(bool, bool), Error>> {
    let acknowledger = route.node.acknowledger.as_ref();
    if let Some(acknowledger) = acknowledger.filter(|_| aim == Aim::Lease) {
        let renewals = renewals.into_iter().map(|one| route.address(one));
        let answers = acknowledger.renew_all(renewals.collect()).await;
        let counted = |answer: Acknowledged| (answer.held, answer.by_enough.is_ok());
        return answers.into_iter().map(|one| one.map(counted)).collect();
    }
    // Renewing twice does no harm, and the next connection may be a good one.
    let replies = route.send_all_idempotent(renewals).await;
    let counted = |held| (held, acknowledger.is_none());
    replies.into_iter().map(|one| one.map(counted)).collect()
}

/// What is confirmed under this attachment must be so by the server that it is of.
fn server_of(attachment: Option<&Arc<Attachment>>) -> Option<&ServerId> {
    attachment.and_then(|attachment| attachment.server())
}
