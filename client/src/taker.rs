//! Who takes a lock, and on what terms: what can be said of a lock of any kind before it is taken.

use std::sync::Arc;
use std::time::Duration;

use crate::attempt::{self, Patience, Request};
use crate::client::Core;
use crate::error::Error;
use crate::guard::Guard;
use crate::hold::whole_millis;
use crate::mode::Mode;
use crate::owner::{Owner, Terms};

#[derive(Clone)]
pub(crate) struct Taker {
    core: Arc<Core>,
    pub(crate) lease: Option<Duration>,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) owner: Option<Owner>,
}

impl Taker {
    pub(crate) fn new(core: Arc<Core>) -> Self {
        Self {
            core,
            lease: None,
            max_hold: None,
            owner: None,
        }
    }

    /// The guard must be of the mode.
    pub(crate) async fn take<M>(
        &self,
        mode: Mode,
        names: &[Arc<[u8]>],
        patience: Patience,
    ) -> Result<Guard<M>, Error> {
        let own = self.owner.is_none();
        let owner = self.owner.clone().unwrap_or_else(|| self.core.owner());
        let request = Request {
            core: Arc::clone(&self.core),
            target: owner.target(mode, names),
            terms: self.terms(),
            patience,
            own,
        };
        // All that this future owns is the receiving end. If it is dropped here, the attempt sees
        // that and undoes what it has begun; what is in the channel already is dropped with it.
        let held = attempt::start(request).await;
        held.unwrap_or_else(|_| Err(Error::no_runtime()))
            .map(Guard::new)
    }

    fn terms(&self) -> Terms {
        let lease = whole_millis(self.lease.unwrap_or(self.core.lease));
        let max_hold = self.max_hold.or(self.core.max_hold).map(whole_millis);
        Terms {
            lease: max_hold.map_or(lease, |longest| lease.min(longest)),
            renewed: self.lease.is_none(),
            max_hold,
        }
    }
}
