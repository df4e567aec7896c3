//! The client without a server.

mod bounds; // what its types can be used for
mod settings; // those that cannot be kept are refused
