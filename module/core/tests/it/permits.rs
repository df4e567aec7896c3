//! Permits, and changes to their keys by others.

// The judge of the core: permits too simple to be wrong.
mod twin;
// The stand-in for the server: a hash, a limit, and a driver that works like the module.
mod world;
// The tests: random histories, and the contract's own sentences.
mod model;
mod sentences;
