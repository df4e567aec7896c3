//! Options whose values are words.

use redis_module::RedisError;
use redis_module::configuration::{
    ConfigurationContext, ConfigurationValue, EnumConfigurationValue,
};
use std::sync::atomic::{AtomicI32, Ordering};

/// An option with one of a few words as its value. The first word, number 0, is the default.
pub(crate) struct Choice<T> {
    number: AtomicI32,
    pub(crate) default: T,
}

impl<T: EnumConfigurationValue> Choice<T> {
    pub(crate) const fn new(first: T) -> Self {
        Self {
            number: AtomicI32::new(0),
            default: first,
        }
    }

    pub(crate) fn now(&self) -> T {
        let number = self.number.load(Ordering::Relaxed);
        T::try_from(number).unwrap_or_else(|_| self.default.clone())
    }
}

impl<T: EnumConfigurationValue + Sync + Send> ConfigurationValue<T> for Choice<T> {
    fn get(&self, _ctx: &ConfigurationContext) -> T {
        self.now()
    }

    fn set(&self, _ctx: &ConfigurationContext, value: T) -> Result<(), RedisError> {
        self.number.store(value.into(), Ordering::Relaxed);
        Ok(())
    }
}

pub(crate) use publish::PublishMode;
pub(crate) use replicate::ReplicateMode;

/// The macro imports a trait each time, so each list of words has a module of its own.
mod publish {
    use redis_module::enum_configuration;

    enum_configuration! {
        /// The ways to send the unlock message, named as an operator writes them.
        #[derive(Debug, PartialEq, Eq)]
        #[allow(non_camel_case_types, reason = "the names are the option's values")]
        pub(crate) enum PublishMode {
            auto = 0,
            classic = 1,
            sharded = 2,
            both = 3,
            off = 4,
        }
    }
}

mod replicate {
    use redis_module::enum_configuration;

    enum_configuration! {
        /// The commands that tell of a new lock: one `RESTORE`, or `HSET` and `PEXPIREAT`.
        #[derive(Debug, PartialEq, Eq)]
        #[allow(non_camel_case_types, reason = "the names are the option's values")]
        pub(crate) enum ReplicateMode {
            restore = 0,
            plain = 1,
        }
    }
}
