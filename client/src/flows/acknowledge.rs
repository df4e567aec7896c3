//! A grant, and each renewal after it, counts once enough replicas or disks have it: see
//! [`Acknowledger`].
//!
//! [`Acknowledger`]: crate::wire::durability::Acknowledger

use std::sync::Arc;

use tokio::time::Instant;

use crate::error::Error;
use crate::flows::renew;
use crate::ledger::{Hold, Renewal, Reserved};
use crate::topology::{Redirects, Route, Router};
use crate::wire::durability::Acknowledger;

/// Waits until enough have this hold, wherever it is by now.
pub(crate) async fn acknowledged(router: &Router, hold: &Arc<Hold>) -> Result<(), Error> {
    if router
        .route(hold.target().key())
        .node
        .acknowledger
        .is_none()
    {
        return Ok(());
    }
    let renewed = extended(router, hold, Hold::kept).await;
    renewed.map_err(Error::unacknowledged)
}

/// Starts the lease of a hold anew, and waits until that counts.
pub(crate) async fn renewed(router: &Router, hold: &Arc<Hold>) -> Result<(), Error> {
    extended(router, hold, Hold::anew).await
}

/// Renews a hold with this lease where it is by now.
async fn extended(
    router: &Router,
    hold: &Arc<Hold>,
    lease: impl Fn(&Hold, Instant) -> Reserved,
) -> Result<(), Error> {
    let (target, key) = (hold.target(), hold.target().key());
    let mut redirects = Redirects::new(router, key);
    let mut route = router.route(key);
    let mut broken = false;
    loop {
        let attachment = route.node.session.attachment();
        let Some(acknowledger) = &route.node.acknowledger else {
            let told =
                renew::renew(router, target, hold.token(), || lease(hold, Instant::now())).await;
            let (still, renewal) = told?;
            return hold
                .renewed(still, &renewal, Instant::now())
                .map_err(Error::lost);
        };
        let Err(error) = renewed_at(&route, acknowledger, hold, lease(hold, Instant::now())).await
        else {
            return Ok(());
        };
        // Renewing twice does no harm, and the next connection may be a good one.
        if !broken && error.is_broken_connection() {
            broken = true;
            continue;
        }
        let next = redirects.next(error, &route, attachment.as_ref());
        route = next.await?.route;
    }
}

/// Renews it on the connection that waits.
async fn renewed_at(
    route: &Route,
    acknowledger: &Acknowledger,
    hold: &Arc<Hold>,
    lease: Reserved,
) -> Result<(), Error> {
    let session = &route.node.session;
    // Taken before anything is sent: what is confirmed now counts on this or a later one.
    let attachment = session.attachment().ok_or_else(Error::not_attached)?;
    let renewal = hold.renewal(lease.lease, &session.name);
    let renewal = route.address(renewal.only_for(attachment.server()));
    let answer = acknowledger.renew(renewal).await?;
    // The time that went by counts: the lease began when this was sent.
    let renewal = Renewal {
        lease: lease.answered(answer.held),
        attachment: Some(attachment),
        acknowledged: answer.by_enough.is_ok(),
    };
    hold.renewed(answer.held, &renewal, Instant::now())
        .map_err(Error::lost)?;
    answer.by_enough
}
