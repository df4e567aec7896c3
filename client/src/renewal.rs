//! Renewing holds: many of them in one pipeline.

use std::sync::Arc;

use crate::command::Command;
use crate::driver::Driver;
use crate::error::Error;
use crate::hold::{Hold, Renewal};
use crate::session::Session;
use crate::trace;

/// Renews these holds, those with a lease of their own only up to the end they have: whether each
/// was confirmed or found lost.
pub(crate) async fn confirm(driver: &Driver, session: &Session, holds: &[Arc<Hold>]) -> bool {
    let mut answered = true;
    for (hold, reply) in holds.iter().zip(ask(driver, session, holds).await) {
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
pub(crate) async fn still_held(
    driver: &Driver,
    session: &Session,
    holds: &[Arc<Hold>],
) -> Vec<bool> {
    let replies = ask(driver, session, holds).await;
    let told = holds.iter().zip(replies).map(|(hold, reply)| {
        let target = hold.target();
        matches!(reply, Ok((true, _))) && (target.mode().has_token() || target.is_alone())
    });
    told.collect()
}

/// One reply a hold.
async fn ask(
    driver: &Driver,
    session: &Session,
    holds: &[Arc<Hold>],
) -> Vec<Result<(bool, Renewal), Error>> {
    // Taken before anything is sent: what is confirmed now counts on this attachment or a later.
    let attachment = session.attachment();
    let leases: Vec<_> = holds.iter().map(|hold| hold.kept()).collect();
    let commands: Vec<_> = holds
        .iter()
        .zip(&leases)
        .map(|(hold, lease)| hold.renewal(*lease).under(attachment.as_ref()))
        .collect();
    let span = trace::renew(commands.len());
    match span.around(send(driver, &commands)).await {
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

async fn send(driver: &Driver, commands: &[Command<bool>]) -> Replies {
    match driver.send_all(commands).await {
        // Renewing twice does no harm, and the next connection may be a good one.
        Err(error) if error.is_broken_connection() => driver.send_all(commands).await,
        answer => answer,
    }
}

type Replies = Result<Vec<Result<bool, Error>>, Error>;
