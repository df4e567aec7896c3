//! Renewing holds: many of them in one pipeline.

use std::sync::Arc;

use crate::command::Command;
use crate::error::Error;
use crate::hold::{Hold, Renewal};
use crate::nodes::{Nodes, Reached, Site};
use crate::session::Attachment;
use crate::trace;

/// Renews these holds, those with a lease of their own only up to the end they have: whether each
/// was confirmed or found lost.
pub(crate) async fn confirm(nodes: &Nodes, holds: &[Arc<Hold>]) -> bool {
    let mut answered = true;
    for (hold, reply) in holds.iter().zip(ask(nodes, holds).await) {
        match reply {
            // Whether it was lost the guard will say.
            Ok((held, renewal)) => drop(hold.renewed(held, &renewal)),
            // A refusal is no word of a loss: the server may be loading, or have been made a
            // replica. The guard hears of it when its lease ends unconfirmed.
            Err(_) => answered = false,
        }
    }
    answered
}

/// Whether each of these holds is still held, as far as can be learned. One that the server cannot
/// tell by its token from a later one of its owner may have been lost if there is another.
pub(crate) async fn still_held(nodes: &Nodes, holds: &[Arc<Hold>]) -> Vec<bool> {
    let replies = ask(nodes, holds).await;
    let told = holds.iter().zip(replies).map(|(hold, reply)| {
        let target = hold.target();
        matches!(reply, Ok((true, _))) && (target.mode().has_token() || target.is_alone())
    });
    told.collect()
}

/// Starts the whole lease of this hold anew: whether it is still held.
pub(crate) async fn anew(nodes: &Nodes, hold: &Hold) -> Told {
    let site = nodes.site(hold.target());
    let attachment = site.node.session.attachment();
    let error = match anew_at(&site, attachment.clone(), hold).await {
        Err(error) if error.is_no_session() => error,
        answer => return answer,
    };
    let known = attachment.map(|attachment| Reached { site, attachment });
    let next = nodes.next_within(hold.target(), known.as_ref()).await;
    let Reached { site, attachment } = next.map_err(|_| error)?;
    anew_at(&site, Some(attachment), hold).await
}

async fn anew_at(site: &Site, attachment: Option<Arc<Attachment>>, hold: &Hold) -> Told {
    let lease = hold.anew();
    let renewal = hold.renewal(lease, &site.node.session.name);
    let renewal = renewal.under(attachment.as_ref());
    let still = site.send_harmless(renewal).await?;
    Ok((still, Renewal { lease, attachment }))
}

/// What the server said of one hold.
type Told = Result<(bool, Renewal), Error>;

/// One reply a hold.
async fn ask(nodes: &Nodes, holds: &[Arc<Hold>]) -> Vec<Told> {
    let Some(first) = holds.first() else {
        return Vec::new();
    };
    ask_at(&nodes.site(first.target()), holds).await
}

/// One reply a hold, all of one node.
async fn ask_at(site: &Site, holds: &[Arc<Hold>]) -> Vec<Told> {
    let session = &site.node.session;
    // Taken before anything is sent: what is confirmed now counts on this attachment or a later.
    let attachment = session.attachment();
    let leases: Vec<_> = holds.iter().map(|hold| hold.kept()).collect();
    let commands: Vec<_> = holds
        .iter()
        .zip(&leases)
        .map(|(hold, lease)| hold.renewal(*lease, &session.name))
        .map(|renewal| renewal.under(attachment.as_ref()))
        .collect();
    let span = trace::renew(commands.len());
    match span.around(send(site, &commands)).await {
        Err(error) => holds.iter().map(|_| Err(error.clone())).collect(),
        Ok(replies) => {
            let told = replies.into_iter().zip(leases).map(|(reply, lease)| {
                let attachment = attachment.clone();
                Ok((reply?, Renewal { lease, attachment }))
            });
            told.collect()
        }
    }
}

async fn send(site: &Site, commands: &[Command<bool>]) -> Replies {
    match site.send_all(commands).await {
        // Renewing twice does no harm, and the next connection may be a good one.
        Err(error) if error.is_broken_connection() => site.send_all(commands).await,
        answer => answer,
    }
}

type Replies = Result<Vec<Result<bool, Error>>, Error>;
