//! Which lock a quorum is asked for, and on what terms.

use std::sync::Arc;
use std::time::Duration;

use futures_util::future::BoxFuture;
use futures_util::stream::FuturesUnordered;

use crate::Error;
use crate::api::Guard;
use crate::quorum::{Core, Member};

#[derive(Clone)]
pub(crate) struct Terms {
    pub(crate) core: Arc<Core>,
    pub(crate) name: Arc<[u8]>,
    pub(crate) lease: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
}

impl Terms {
    /// Takes the lock on one server, if it answers in time.
    pub(crate) fn take(
        &self,
        server: usize,
        member: &Arc<Member>,
        max_hold: Option<Duration>,
    ) -> BoxFuture<'static, (usize, Result<Guard, Error>)> {
        let (member, this) = (Arc::clone(member), self.clone());
        let answer = async move {
            let mut lock = member.client()?.lock(&*this.name);
            lock.options.lease = this.lease;
            lock.options.max_hold = max_hold;
            // `in_time` drops the call when its time is up: a grant that comes later is released.
            this.core.in_time(lock.try_lock()).await
        };
        Box::pin(async move { (server, answer.await) })
    }
}

/// The pending requests for the lock, each with its server's number. Dropping them releases any
/// grants that still arrive.
pub(crate) type Round = FuturesUnordered<BoxFuture<'static, (usize, Result<Guard, Error>)>>;
