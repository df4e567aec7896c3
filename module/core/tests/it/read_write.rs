//! The read-write lock, beside plain ones of the same names, and changes to its keys by others.

// The tests: random histories, all short ones, and the contract's own sentences.
mod exhaustive;
pub(crate) mod model;
mod sentences;
