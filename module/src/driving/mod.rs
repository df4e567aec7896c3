//! What starts a turn of the core, and how it is carried through.

pub(crate) mod blocking;
pub(crate) mod changes;
pub(crate) mod pump;
pub(crate) mod turn;
