//! What is written and told: to keys, replicas, subscribers and clients.

pub(crate) mod effects;
pub(crate) mod publish;
pub(crate) mod replicate;
pub(crate) mod reply;
