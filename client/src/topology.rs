//! Where a lock is: which node serves it.

mod router;
pub(crate) use router::{Route, Router};

mod node;
pub(crate) use node::{Identity, Node};

mod cluster;
use cluster::Map;
pub(crate) use cluster::Moves;

mod slots;
use slots::Slots;
pub(crate) use slots::slot_of;
