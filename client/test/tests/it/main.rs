//! The client at the server in memory.

mod answers; // answers that are late or lost, and refusals
mod cluster; // slots that move, and nodes that are replaced
mod ends; // connections that end
mod failover; // replicas that lag, and sentinels
mod guarded; // commands that are run under a lock
mod kept; // locks that stay at the client
mod options; // what one guard asks for is not the next one's
mod quorum; // a majority of several servers
mod races; // between what a client does and what it is told
mod still; // a client or a server that stands still
mod turns; // calls of one owner that wait for each other
mod unheard; // a grant of which no word comes
mod wanted; // guards that hear of those who wait
