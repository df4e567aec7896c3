//! Options whose values are words.

pub(crate) use publish::PublishMode;
pub(crate) use replicate::ReplicateMode;

/// The macro imports a trait each time, so each list of words has a module of its own.
mod publish {
    use redis_module::enum_configuration;

    enum_configuration! {
        /// The ways to send the unlock message, named as an operator writes them.
        #[derive(Debug, Default, PartialEq, Eq)]
        #[allow(non_camel_case_types, reason = "the names are the option's values")]
        pub(crate) enum PublishMode {
            #[default]
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
        #[derive(Debug, Default, PartialEq, Eq)]
        #[allow(non_camel_case_types, reason = "the names are the option's values")]
        pub(crate) enum ReplicateMode {
            #[default]
            restore = 0,
            plain = 1,
        }
    }
}
