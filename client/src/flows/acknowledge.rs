//! A grant counts once enough replicas or disks have it: see [`Acknowledger`].
//!
//! [`Acknowledger`]: crate::wire::durability::Acknowledger

use std::sync::Arc;

use tokio::time::Instant;

use crate::error::Error;
use crate::ledger::{Hold, Renewal};
use crate::topology::{Redirects, Route, Router};

/// Waits until enough have this hold, wherever it is by now.
pub(crate) async fn acknowledged(router: &Router, hold: &Arc<Hold>) -> Result<(), Error> {
    let key = hold.target().key();
    let mut redirects = Redirects::new(router, key);
    let mut route = router.route(key);
    loop {
        let attachment = route.node.session.attachment();
        let Err(error) = renewed(&route, hold).await else {
            return Ok(());
        };
        let next = redirects.next(error, &route, attachment.as_ref()).await;
        route = next.map_err(Error::unacknowledged)?.route;
    }
}

/// Renews it on the connection that waits, if there is one.
async fn renewed(route: &Route, hold: &Arc<Hold>) -> Result<(), Error> {
    let Some(acknowledger) = &route.node.acknowledger else {
        return Ok(());
    };
    let session = &route.node.session;
    // Taken before anything is sent: what is confirmed now counts on this or a later one.
    let attachment = session.attachment().ok_or_else(Error::not_attached)?;
    let lease = hold.kept(Instant::now());
    let renewal = hold.renewal(lease.lease, &session.name);
    let renewal = route.address(renewal.only_for(attachment.server()));
    let answer = acknowledger.renew(renewal).await?;
    let lease = lease.answered(answer.held);
    // The time that went by counts: the lease began when this was sent.
    let renewal = Renewal {
        lease,
        attachment: Some(attachment),
    };
    hold.renewed(answer.held, &renewal, Instant::now())
        .map_err(Error::lost)?;
    answer.by_enough
}
