//! Which server is at hand, and its abilities.

use std::process::Command;
use std::sync::LazyLock;

use crate::server::server_program;

/// Flavour and version of the server under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Version {
    /// Valkey, which counts its own versions from 7.2.
    pub valkey: bool,
    /// Major and minor version: `(7, 4)`.
    pub number: (u32, u32),
}

static AT_HAND: LazyLock<Version> = LazyLock::new(|| {
    let output = Command::new(server_program()).arg("--version").output();
    let output = output.unwrap_or_else(|e| panic!("no server {:?}: {e}", server_program()));
    Version::parse(&String::from_utf8_lossy(&output.stdout))
});

impl Version {
    /// The server that [`crate::Server`] starts.
    pub fn at_hand() -> Self {
        *AT_HAND
    }

    /// Reads what `redis-server --version` prints.
    ///
    /// ```
    /// use rlock_tests::Version;
    /// let version = Version::parse("Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0");
    /// assert_eq!(version, Version { valkey: false, number: (7, 0) });
    /// ```
    pub fn parse(text: &str) -> Self {
        let number = text.split("v=").nth(1).expect("a version");
        let mut parts = number.split('.').map(|part| part.parse().unwrap_or(0));
        let mut part = || parts.next().unwrap_or(0);
        Self {
            valkey: text.contains("Valkey"),
            number: (part(), part()),
        }
    }

    /// Whether this is at least that Redis, or at least that Valkey.
    pub fn at_least(self, redis: (u32, u32), valkey: (u32, u32)) -> bool {
        self.number >= if self.valkey { valkey } else { redis }
    }

    /// `CLIENT UNBLOCK` reaches waiters only where a grant in the same turn cannot be lost by it.
    pub fn can_unblock_waiters(self) -> bool {
        self.at_least((7, 4), (8, 0))
    }

    /// `HEXPIRE`: fields of a hash with an end of their own.
    pub fn has_field_expiry(self) -> bool {
        self.at_least((7, 4), (9, 0))
    }

    /// Commands of modules can be put into the standard ACL categories.
    pub fn has_module_categories(self) -> bool {
        self.at_least((7, 2), (7, 2))
    }

    /// `MOVE` and `COPY … DB` reach replicas in the right database. Valkey 8.1 leaves the caller in
    /// the other one, and names that to replicas, where any module listens to key events.
    pub fn replicates_moves(self) -> bool {
        !(self.valkey && self.number == (8, 1))
    }

    /// `MODULE UNLOAD`. Later servers parse pipelined commands before they run them, and crash if
    /// the module of one of them is gone by then.
    pub fn can_unload_modules(self) -> bool {
        !self.at_least((8, 4), (9, 0))
    }

    /// Connections in RESP3 that have subscriptions can wait for a module.
    pub fn blocks_subscribers(self) -> bool {
        !(self.valkey && self.number >= (8, 1))
    }

    /// Slots can move as a whole: `CLUSTER MIGRATION IMPORT` or `CLUSTER MIGRATESLOTS`.
    pub fn moves_whole_slots(self) -> bool {
        self.at_least((8, 4), (9, 0))
    }

    /// Modules can add an ACL category of their own.
    pub fn has_own_categories(self) -> bool {
        self.at_least((7, 4), (8, 0))
    }
}
