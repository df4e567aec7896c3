//! Asking again where a command was not carried out: at another node, or when the session is
//! attached anew.

use std::sync::Arc;

use tokio::time::{Instant, sleep};

use crate::backoff::Backoff;
use crate::error::Error;
use crate::nodes::{HOPS, Nodes, Reached, Site};
use crate::owner::Target;
use crate::session::Attachment;

/// The way of one command to where it is carried out. Each of its stops has said that it did
/// nothing, so asking at the next does no harm.
pub(crate) struct Detour<'a> {
    nodes: &'a Nodes,
    target: &'a Target,
    began: Instant,
    hops: u32,
    backoff: Backoff,
    attached_anew: bool,
}

impl<'a> Detour<'a> {
    pub(crate) fn new(nodes: &'a Nodes, target: &'a Target) -> Self {
        Self {
            nodes,
            target,
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
        site: &Site,
        attachment: Option<&Arc<Attachment>>,
    ) -> Result<Reached, Error> {
        if error.is_no_session() {
            return self.attached_anew(error, site, attachment).await;
        }
        let there = self.nodes.follow(&error, site);
        if there.is_none() && !(error.is_try_again() && self.nodes.are_several()) {
            return Err(error);
        }
        if self.began.elapsed() >= self.nodes.response_timeout {
            return Err(error.misdirected());
        }
        self.hops = self.hops.saturating_add(1);
        // Two nodes that have not yet heard of a move send us to each other.
        if there.is_none() || self.hops > HOPS {
            sleep(self.backoff.next()).await;
        }
        match there {
            Some(there) => self.nodes.reach(there).await,
            None => self.nodes.next_within(self.target, None).await,
        }
    }

    async fn attached_anew(
        &mut self,
        error: Error,
        site: &Site,
        attachment: Option<&Arc<Attachment>>,
    ) -> Result<Reached, Error> {
        if std::mem::replace(&mut self.attached_anew, true) {
            return Err(error);
        }
        let known = attachment.map(|attachment| Reached {
            site: site.clone(),
            attachment: Arc::clone(attachment),
        });
        let next = self.nodes.next_within(self.target, known.as_ref()).await;
        next.map_err(|_| error)
    }
}
