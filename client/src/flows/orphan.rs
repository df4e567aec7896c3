//! Giving back what was granted to nobody.

use std::sync::{Arc, Weak};

use tokio::time::sleep;

use crate::background::Counted;
use crate::backoff::Backoff;
use crate::error::Error;
use crate::flows::Context;
use crate::ledger::{GiveBack, OrphanGrant};
use crate::topology::{MAX_REDIRECTS, Route};
use crate::wire::commands::Answer;
use crate::wire::reply::Released;

impl GiveBack for Context {
    /// Sent at once, which a shutdown waits for; and again, where the token says what is meant,
    /// until it is answered or the client has gone.
    fn give_back(self: Arc<Self>, orphan: OrphanGrant) {
        let route = self.router.route(&orphan.name);
        let answer = route.send(orphan.release.clone());
        let pending = self.background.counted();
        let context = Arc::downgrade(&self);
        self.runtime
            .spawn(go_on_giving_back(context, orphan, route, answer, pending));
    }
}

async fn go_on_giving_back(
    context: Weak<Context>,
    mut orphan: OrphanGrant,
    mut route: Route,
    mut answer: Answer<Released>,
    pending: Counted,
) {
    let mut pending = Some(pending);
    let mut backoff = Backoff::new();
    let (mut hops, mut other_kind) = (0_u32, false);
    loop {
        let error = match answer.await {
            Ok(Released::NotHeld) if other_kind && !orphan.otherwise.is_empty() => None,
            Ok(_) => return,
            Err(error) => Some(error),
        };
        other_kind |= error.as_ref().is_some_and(Error::is_wrong_kind);
        let Some(here) = context.upgrade() else {
            return;
        };
        let there = error
            .as_ref()
            .and_then(|error| here.router.redirected(error, &route));
        let mut pause = false;
        match error.filter(|error| !error.is_wrong_kind()) {
            Some(_) if there.is_some() => {
                hops = hops.saturating_add(1);
                pause = hops > MAX_REDIRECTS;
            }
            Some(error) => {
                if !error.is_unavailable() && !error.is_unknown() {
                    return;
                }
                if !orphan.by_token {
                    // By now it might take what the owner was granted since.
                    for one in orphan.each {
                        Arc::clone(&here).give_back(one);
                    }
                    return;
                }
                pause = true;
            }
            None => {
                let Some(next) = orphan.otherwise.pop() else {
                    return;
                };
                (orphan.release, orphan.by_token) = next;
            }
        }
        route = there.unwrap_or_else(|| here.router.route(&orphan.name));
        drop(here);
        if pause {
            // It cannot be asked now: a shutdown does not wait for that.
            drop(pending.take());
            sleep(backoff.next()).await;
        }
        answer = route.send(orphan.release.clone());
    }
}
