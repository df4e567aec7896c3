//! `rlock.replicate`, in a file of its own: the macro for an option's values works only once in a
//! file.

use redis_module::configuration::{ConfigurationContext, ConfigurationValue};
use redis_module::{RedisError, enum_configuration};
use std::sync::atomic::{AtomicI32, Ordering};

/// `rlock.replicate`: the encoding of changes for replicas and the append-only file. Takes effect
/// with the next command.
pub(crate) static REPLICATE: Replicate = Replicate(AtomicI32::new(0));
pub(crate) const REPLICATE_DEFAULT: ReplicateMode = ReplicateMode::plain;

enum_configuration! {
    /// The encodings, named as an operator writes them.
    #[derive(Debug, PartialEq, Eq)]
    #[allow(non_camel_case_types, reason = "the names are the option's values")]
    pub(crate) enum ReplicateMode {
        plain = 0,
        compact = 1,
    }
}

/// Where `rlock.replicate` is kept.
pub(crate) struct Replicate(AtomicI32);

impl Replicate {
    /// Called by every command.
    #[inline]
    pub(crate) fn is_compact(&self) -> bool {
        self.0.load(Ordering::Relaxed) != 0
    }
}

impl ConfigurationValue<ReplicateMode> for Replicate {
    fn get(&self, _ctx: &ConfigurationContext) -> ReplicateMode {
        if self.is_compact() {
            ReplicateMode::compact
        } else {
            ReplicateMode::plain
        }
    }

    fn set(&self, _ctx: &ConfigurationContext, mode: ReplicateMode) -> Result<(), RedisError> {
        self.0.store(mode.into(), Ordering::Relaxed);
        Ok(())
    }
}
