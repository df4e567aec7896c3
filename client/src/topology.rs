//! Where a lock is: which node serves it.

mod slots;
use slots::Slots;
pub(crate) use slots::slot_of;

mod node;
pub(crate) use node::{Identity, Node};

mod map;
use map::Map;

mod router;
pub(crate) use router::{Route, Router};

mod cluster;
pub(crate) use cluster::Moves;
