//! Permits, and what others do to their keys.

// What says whether the core is right: permits too simple to be wrong.
mod twin;
// What stands in for the server: a hash, a limit, and a driver that does what the module does.
mod world;
// What asks the questions: random histories, and the contract's own sentences.
mod model;
mod sentences;
