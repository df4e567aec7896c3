//! Where a lock is: which node serves it, and whether the session is attached there.

mod router;
pub(crate) use router::{AttachedRoute, MAX_REDIRECTS, Route, Router};

mod node;
pub(crate) use node::{Identity, Node};

mod cluster;
use cluster::Map;

mod names;
use names::{Name, Names, name_of};

mod slots;
use slots::Table;
pub(crate) use slots::slot_of;
