//! Where a lock is: which node serves it.

mod node;
pub(crate) use node::Node;

mod map;
pub(crate) use map::slot_of;

mod router;
pub(crate) use router::{Route, Router};

mod cluster;
