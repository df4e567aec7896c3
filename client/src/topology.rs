//! Where a lock is: which node serves it, and whether the session is attached there.

mod router;
pub(crate) use router::{AttachedRoute, MAX_REDIRECTS, Route, Router};

mod node;
pub(crate) use node::{Identity, Listener, Node, NodeNumber};

mod cluster;
mod names;
mod redirects;
pub(crate) use redirects::Redirects;

pub(crate) mod slots;
