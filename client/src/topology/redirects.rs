//! Asking again where a command was not carried out: at another node, or when the session is
//! attached anew.

use std::sync::Arc;

use tokio::time::{Instant, sleep};

use crate::backoff::Backoff;
use crate::error::Error;
use crate::topology::router::{AttachedRoute, MAX_REDIRECTS, Route, Router};
use crate::wire::session::Attachment;

/// The way of one command to where it is carried out. Each of its stops has said that it did
/// nothing, so asking at the next does no harm.
pub(crate) struct Redirects<'a> {
    router: &'a Router,
    name: &'a [u8],
    began: Instant,
    hops: u32,
    backoff: Backoff,
    attached_anew: bool,
}

impl<'a> Redirects<'a> {
    pub(crate) fn new(router: &'a Router, name: &'a [u8]) -> Self {
        Self {
            router,
            name,
            began: Instant::now(),
            hops: 0,
            backoff: Backoff::new(),
            attached_anew: false,
        }
    }

    /// Where to ask after this error, as soon as the session is attached there; or the error to
    /// tell, if asking again is of no use or takes longer than the reply to a command may.
    pub(crate) async fn next(
        &mut self,
        error: Error,
        route: &Route,
        attachment: Option<&Arc<Attachment>>,
    ) -> Result<AttachedRoute, Error> {
        if error.is_no_session() {
            return self.attached_anew(error, route, attachment).await;
        }
        let there = self.router.redirected(&error, route);
        if there.is_none() && !(error.is_try_again() && self.router.are_several()) {
            return Err(error);
        }
        if self.began.elapsed() >= self.router.response_timeout {
            return Err(error.misdirected());
        }
        self.hops = self.hops.saturating_add(1);
        // Two nodes that have not yet heard of a move send us to each other.
        if there.is_none() || self.hops > MAX_REDIRECTS {
            sleep(self.backoff.next()).await;
        }
        match there {
            Some(there) => self.router.reach(there).await,
            None => self.router.next_within(self.name, None).await,
        }
    }

    async fn attached_anew(
        &mut self,
        error: Error,
        route: &Route,
        attachment: Option<&Arc<Attachment>>,
    ) -> Result<AttachedRoute, Error> {
        // Connections may break one after the other: each time nothing was done.
        let again = std::mem::replace(&mut self.attached_anew, true);
        if again && self.began.elapsed() >= self.router.response_timeout {
            return Err(error);
        }
        let known = attachment.map(|attachment| AttachedRoute {
            route: route.clone(),
            attachment: Arc::clone(attachment),
        });
        let next = self.router.next_within(self.name, known.as_ref()).await;
        next.map_err(|_| error)
    }
}
