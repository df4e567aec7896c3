//! The read-write lock, beside plain ones of the same names, and what others do to its keys.

// What asks the questions: random histories, all short ones, and the contract's own sentences.
mod exhaustive;
pub(crate) mod model;
mod sentences;
