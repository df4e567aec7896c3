//! The read-write lock, beside plain ones of the same names, and what others do to its keys.

// What stands in for the server: a map with readers' timeout keys, Redisson's scripts, and a driver
// that does what the module does.
pub(crate) mod foreign;
pub(crate) mod keyspace;
pub(crate) mod world;
// What says whether the core is right: a lock too simple to be wrong.
mod invariants;
mod life;
pub(crate) mod twin;
// What asks the questions: random histories, all short ones, and the contract's own sentences.
mod exhaustive;
mod model;
mod sentences;
