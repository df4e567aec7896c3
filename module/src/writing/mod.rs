//! Carries out decisions: writes keys, replicates, publishes, replies.

pub(crate) mod effects;
pub(crate) mod fields;
pub(crate) mod new_hash;
pub(crate) mod publish;
pub(crate) mod reply;
pub(crate) mod restore;
