//! Who holds and who waits here, as far as this client knows. No I/O, and no task.

mod owner;
pub use owner::Owner;

pub(crate) mod entries;
pub(crate) mod hold;
pub(crate) mod usage;
