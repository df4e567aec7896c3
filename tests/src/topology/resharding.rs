//! A slot on its way.

use crate::server::Server;
use crate::topology::{node_id, slot_of};

/// A slot that moves from one node of a cluster to another, step by step as a resharding does it:
/// [`Resharding::open`], [`Resharding::migrate_some`] until no key is left, [`Resharding::close`].
#[derive(Debug)]
pub struct Resharding<'a> {
    slot: i64,
    from: &'a Server,
    to: &'a Server,
}

impl<'a> Resharding<'a> {
    /// Of the slot of `key`.
    #[track_caller]
    pub fn of(key: &str, from: &'a Server, to: &'a Server) -> Self {
        let slot = slot_of(from, key);
        Self { slot, from, to }
    }

    /// Begins: keys that are not there any more are asked for at the other node (`ASK`).
    #[track_caller]
    pub fn open(&self) {
        let Self { slot, from, to } = self;
        let importing = format!("CLUSTER SETSLOT {slot} IMPORTING {}", node_id(from));
        assert_eq!(to.run(importing), "OK");
        let migrating = format!("CLUSTER SETSLOT {slot} MIGRATING {}", node_id(to));
        assert_eq!(from.run(migrating), "OK");
    }

    /// Moves these keys.
    #[track_caller]
    pub fn migrate(&self, keys: &[impl AsRef<str>]) {
        let port = self.to.port_for_servers().to_string();
        let mut migrate = ["MIGRATE", "127.0.0.1", &port, "", "0", "5000", "KEYS"].to_vec();
        migrate.extend(keys.iter().map(AsRef::as_ref));
        // One may have run out meanwhile: NOKEY, if it was the only one.
        let moved = self.from.connect().cmd(&migrate);
        assert!(!moved.is_error(), "{moved:?}");
    }

    /// Moves up to `count` of the keys that are left. False if there were none.
    #[track_caller]
    pub fn migrate_some(&self, count: usize) -> bool {
        let ask = format!("CLUSTER GETKEYSINSLOT {} {count}", self.slot);
        let keys = self.from.run(ask).texts();
        if !keys.is_empty() {
            self.migrate(&keys);
        }
        !keys.is_empty()
    }

    /// Ends: the slot is the other node's. The `bystanders`, primaries too, are told at once, not
    /// by and by.
    #[track_caller]
    pub fn close(&self, bystanders: &[&Server]) {
        let Self { slot, from, to } = self;
        let close = format!("CLUSTER SETSLOT {slot} NODE {}", node_id(to));
        for node in [to, from].into_iter().chain(bystanders) {
            assert_eq!(node.run(&close), "OK");
        }
    }
}
