//! Carries out decisions: writes keys, replicates, publishes, replies.

pub(crate) mod effects;
pub(crate) mod publish;
pub(crate) mod reply;
