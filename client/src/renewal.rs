//! Renewing holds: many of them behind one another, without waiting in between.

use std::sync::Arc;

use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::backoff::Backoff;
use crate::command;
use crate::detour::Detour;
use crate::error::Error;
use crate::hold::{Hold, Renewal};
use crate::nodes::{HOPS, Nodes, Site};
use crate::owner::{Reserved, Target};
use crate::trace;

/// Renews these holds, those with a lease of their own only up to the end they have; again and
/// again until each was confirmed or found lost, or this is of no use any more. A server that is
/// loading, or a cluster that has just lost a node, says no to all at first.
pub(crate) async fn confirm(
    nodes: &Arc<Nodes>,
    mut holds: Vec<Arc<Hold>>,
    is_of_use: impl Fn() -> bool,
) {
    let mut backoff = Backoff::new();
    loop {
        // What nobody else has any more has been given back.
        holds.retain(|hold| Arc::strong_count(hold) > 1 && hold.lost().is_none());
        if holds.is_empty() || !is_of_use() {
            return;
        }
        let mut asked = JoinSet::new();
        for (site, holds) in by_site(nodes, std::mem::take(&mut holds)) {
            let nodes = Arc::clone(nodes);
            asked.spawn(async move { unconfirmed_at(&nodes, site, holds).await });
        }
        while let Some(unconfirmed) = asked.join_next().await {
            holds.extend(unconfirmed.unwrap_or_default());
        }
        if !holds.is_empty() {
            sleep(backoff.next()).await;
        }
    }
}

/// Renews holds at one site: whether each was confirmed or found lost.
pub(crate) async fn confirm_at(nodes: &Nodes, site: Site, holds: Vec<Arc<Hold>>) -> bool {
    unconfirmed_at(nodes, site, holds).await.is_empty()
}

/// The same: those of which nothing was learned.
async fn unconfirmed_at(nodes: &Nodes, site: Site, holds: Vec<Arc<Hold>>) -> Vec<Arc<Hold>> {
    let mut unconfirmed = Vec::new();
    for (hold, told) in ask(nodes, site, holds).await {
        match told {
            // Whether it was lost the guard will say.
            Ok((held, renewal)) => drop(hold.renewed(held, &renewal)),
            // A refusal is no word of a loss: the server may be loading, or have been made a
            // replica. The guard hears of it when its lease ends unconfirmed.
            Err(_) => unconfirmed.push(hold),
        }
    }
    unconfirmed
}

/// What the server said of one hold.
pub(crate) type Told = Result<(bool, Renewal), Error>;

/// Renews one hold, with a lease that is to be asked for when it is sent.
pub(crate) async fn renew(
    nodes: &Nodes,
    target: &Target,
    token: u64,
    lease: impl Fn() -> Reserved,
) -> Told {
    let mut detour = Detour::new(nodes, target);
    let mut site = nodes.site(target);
    let mut attachment = site.node.session.attachment();
    loop {
        let lease = lease();
        let session = &site.node.session.name;
        let renewal = command::renew(target.subject(), lease.lease.length, token, session);
        let renewal = renewal.under(attachment.as_ref());
        let error = match site.send_harmless(renewal).await {
            Ok(held) => {
                let lease = lease.answered(held);
                return Ok((held, Renewal { lease, attachment }));
            }
            Err(error) => error,
        };
        let next = detour.next(error, &site, attachment.as_ref()).await?;
        (site, attachment) = (next.site, Some(next.attachment));
    }
}

/// The holds to ask about at one site.
pub(crate) type Group = (Site, Vec<Arc<Hold>>);

/// Holds by where they are.
pub(crate) fn by_site(nodes: &Nodes, holds: Vec<Arc<Hold>>) -> Vec<Group> {
    let mut groups = Vec::new();
    for hold in holds {
        add(&mut groups, nodes.site(hold.target()), hold);
    }
    groups
}

fn add(groups: &mut Vec<Group>, site: Site, hold: Arc<Hold>) {
    match groups.iter_mut().find(|(other, _)| other.is_same(&site)) {
        Some((_, holds)) => holds.push(hold),
        None => groups.push((site, vec![hold])),
    }
}

/// Asks at one site, and about what is not there where that sends us: one reply a hold.
pub(crate) async fn ask(
    nodes: &Nodes,
    site: Site,
    holds: Vec<Arc<Hold>>,
) -> Vec<(Arc<Hold>, Told)> {
    let mut told = Vec::with_capacity(holds.len());
    let mut groups = vec![(site, holds)];
    for hop in 0..=HOPS {
        let mut elsewhere = Vec::new();
        for (site, holds) in groups {
            // A node that we are sent to may be a new one. Why it cannot be reached it says itself.
            if hop > 0 {
                let _ = nodes.reach(site.clone()).await;
            }
            let replies = ask_at(&site, &holds).await;
            for (hold, reply) in holds.into_iter().zip(replies) {
                let error = reply.as_ref().err();
                match error.and_then(|error| nodes.follow(error, &site)) {
                    Some(there) if hop < HOPS => add(&mut elsewhere, there, hold),
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

/// One reply a hold, all of one site.
async fn ask_at(site: &Site, holds: &[Arc<Hold>]) -> Vec<Told> {
    let session = &site.node.session;
    // Taken before anything is sent: what is confirmed now counts on this attachment or a later.
    let attachment = session.attachment();
    let leases: Vec<_> = holds.iter().map(|hold| hold.kept()).collect();
    let commands: Vec<_> = holds
        .iter()
        .zip(&leases)
        .map(|(hold, lease)| hold.renewal(lease.lease, &session.name))
        .map(|renewal| renewal.under(attachment.as_ref()))
        .collect();
    let span = trace::renew(commands.len());
    // Renewing twice does no harm, and the next connection may be a good one.
    let replies = span.around(site.send_all_harmless(commands)).await;
    let told = replies.into_iter().zip(leases).map(|(reply, lease)| {
        let attachment = attachment.clone();
        let held = reply?;
        let lease = lease.answered(held);
        Ok((held, Renewal { lease, attachment }))
    });
    told.collect()
}
