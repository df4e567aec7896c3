//! A lock by scripts, for scale.

use rlock_tests::Conn;
use rlock_tests::scripts::{ACQUIRE, COMPARE_AND_DELETE, RELEASE};

use crate::operations::{Step, step};

/// The script that does the work of `RLOCK.GUARD`.
const GUARDED: &str = "if redis.call('hexists', KEYS[1], ARGV[1]) == 0 then \
     return redis.error_reply('NOTHELD') end \
     return redis.call('set', KEYS[2], ARGV[2])";

/// The names by which the server knows them.
#[derive(Clone)]
pub(crate) struct Scripts {
    acquire: String,
    release: String,
    guarded: String,
    compare_and_delete: String,
}

impl Scripts {
    pub(crate) fn load(conn: &mut Conn) -> Self {
        let mut load = |script| conn.cmd(&["SCRIPT", "LOAD", script]).text();
        Self {
            acquire: load(ACQUIRE),
            release: load(RELEASE),
            guarded: load(GUARDED),
            compare_and_delete: load(COMPARE_AND_DELETE),
        }
    }

    pub(crate) fn pair(&self, key: &str, owner: &str) -> Vec<Step> {
        let Self {
            acquire, release, ..
        } = self;
        let latch = format!("latch:{key}");
        let keys = format!("3 {key} released:{key} {latch}");
        vec![
            step(format!("EVALSHA {acquire} 1 {key} 30000 {owner}"), "null"),
            step(format!("EVALSHA {release} {keys} {owner} 30000 16000"), "1"),
            step(format!("DEL {latch}"), "1"),
        ]
    }

    /// The lock that most write by themselves.
    pub(crate) fn simple_pair(&self, key: &str, owner: &str) -> Vec<Step> {
        let script = &self.compare_and_delete;
        vec![
            step(format!("SET {key} {owner} NX PX 30000"), "+OK"),
            step(format!("EVALSHA {script} 1 {key} {owner}"), "1"),
        ]
    }

    pub(crate) fn guarded_set(&self, key: &str, owner: &str) -> Step {
        let script = &self.guarded;
        step(
            format!("EVALSHA {script} 2 {key} data:{key} {owner} value"),
            "+OK",
        )
    }
}
